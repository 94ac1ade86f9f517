"use strict";
// Markdown in texts, as elements: code, tables, headings, bold and italics, with formulas in them. markdown-it finds them;
// nothing of a text is ever read as HTML. All else stays what it is: links, images, lists and quotes are text with their
// signs, since "- 3" and "> 5" are mathematics more often than not, and so is a star beside a letter or digit.
const markdown = (() => {
  const OFF = ["link", "image", "autolink", "html_inline", "html_block", "reference", "escape", "entity", "blockquote", "hr",
               "lheading", "strikethrough", "list", "newline"];
  const parser = new markdownit({ html: false, linkify: false, typographer: false }).disable(OFF, true);
  const HELD = /\uE000(\d+)\uE001/;  // a formula's place, in characters of private use

  // Returns an element's children for a text of one paragraph, head or cell.
  function inline(text, held) {
    const stack = [[]], add = (...some) => stack.at(-1).push(...some);
    const tokens = parser.parseInline(text, {})[0].children;
    const literal = new Set();  // signs that are mathematics: 3*4*5
    tokens.forEach((token, i) => {
      if (!/^(em|strong)_open$/.test(token.type)) return;
      const end = tokens.findIndex((other, j) => j > i && other.level === token.level && other.type === token.type.replace("open", "close"));
      const before = (tokens[i - 1] || {}).content || "", after = (tokens[end + 1] || {}).content || "", first = (tokens[i + 1] || {}).content || "";
      if (/[\p{L}\p{N})\]]$/u.test(before) || /^[\p{L}\p{N}([]/u.test(after) || (token.type === "em_open" && !/^\p{L}/u.test(first)))
        literal.add(token).add(tokens[end]);
    });
    for (const token of tokens) {
      if (literal.has(token)) add(token.markup);
      else if (token.nesting > 0) stack.push([]);
      else if (token.nesting < 0) { const inner = stack.pop(); add(filled(token.tag, inner)); }
      else if (token.type === "code_inline") add(filled("code", [source(token.content, held)]));
      else add(...formulas(token.type === "text" ? token.content : token.content || "\n", held));
    }
    return stack[0];
  }
  function filled(tag, children) { const made = document.createElement(tag); made.append(...children); return made; }
  const source = (text, held) => text.replace(new RegExp(HELD, "g"), (all, i) => (held[i] ? held[i].dataset.source : all));
  const formulas = (text, held) => text.split(new RegExp(HELD)).map((part, i) => (i % 2 ? held[part] || "" : part));

  // Sets an element's text; returns the element.
  function write(into, text) {
    into.dir = "auto";
    if (text.length > mathematics.LONGEST_TEXT) { into.textContent = text; return into; }
    const held = [];
    const whole = mathematics.parts(text).map((part) => (typeof part === "string" ? part : `\uE000${held.push(part) - 1}\uE001`)).join("");
    const lines = whole.split("\n"), stack = [into];
    into.replaceChildren();
    for (const token of parser.parse(whole, {})) {
      const top = stack.at(-1);
      if (token.type === "fence" || token.type === "code_block") {
        const code = token.type === "fence" ? token.content.replace(/\n$/, "") : lines.slice(...token.map).join("\n").trimEnd();
        top.append(mathematics.scrolls(filled("pre", [filled("code", [source(code, held)])])));
      } else if (token.type === "inline") {
        const kind = top.tagName;
        const of = kind === "P" && !top.className ? lines.slice(...token.map).join("\n") : token.content;
        top.append(...inline(of, held));
      } else if (token.nesting > 0) {
        const made = document.createElement(token.type === "heading_open" ? "p" : token.tag);
        if (token.type === "heading_open") { made.className = "head"; made.append(`${token.markup} `); }
        if (token.attrGet("style")) made.style.textAlign = token.attrGet("style").replace("text-align:", "");
        if (token.tag === "table") { const wide = mathematics.scrolls(filled("div", [made])); wide.className = "wide"; top.append(wide); }
        else top.append(made);
        stack.push(made);
      } else if (token.nesting < 0) stack.pop();
    }
    return into;
  }
  // Whether a text is shown otherwise than as it is.
  const found = (into) => !!into.querySelector(".math,code,table,strong,em");

  return { write, found };
})();
