"use strict";
// Mathematics in texts, drawn by KaTeX where the page has it: $...$, $$...$$, \(...\), \[...\] and environments. All
// else of a text, and a formula that KaTeX does not take, stays what it is: text. A copy has the formulas' source.
const mathematics = (() => {
  const LONGEST_TEXT = 20000, MOST = 200;
  // A dollar opens a formula before a character that is no space, and closes it after such a one if no digit follows:
  // sums of money are no formulas. The report has the same rule.
  const FORMULA = new RegExp([
    String.raw`\n?[ \t]*\\\[(?<bracket>[^]{1,2000}?)\\\][ \t]*\n?`,
    String.raw`\n?[ \t]*\$\$(?<dollars>[^]{1,2000}?)\$\$[ \t]*\n?`,
    String.raw`\n?[ \t]*(?<environment>\\begin\{(?<name>(?:align|alignat|aligned|array|cases|equation|gather|gathered|split|[bpvBV]?matrix)\*?)\}[^]{1,2000}?\\end\{\k<name>\})[ \t]*\n?`,
    String.raw`\\\((?<round>[^]{1,2000}?)\\\)`,
    String.raw`(?<![\\$])\$(?![\s$])(?<dollar>(?:[^$\\\n]|\\[^\n]){1,2000}?)(?<!\s)\$(?!\d)`,
  ].join("|"), "g");
  // No links, images or classes of the text's own; no size beyond the step; no macro that expands for ever.
  const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 10, maxExpand: 200,
                    output: document.querySelector('link[href$="katex.min.css"]') ? "htmlAndMathml" : "mathml" };

  // A formula that is wider than its step scrolls, by keys too: who has no mouse reaches it with Tab.
  const width = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });

  function formula(match) {
    const { bracket, dollars, environment, round, dollar } = match.groups, display = bracket || dollars || environment;
    const made = document.createElement("span");
    made.className = display ? "math display" : "math";
    try { katex.render(display || round || dollar, made, { ...OPTIONS, displayMode: !!display }); } catch { return match[0]; }
    made.dataset.source = match[0];
    if (display) width.observe(made);
    return made;
  }

  // A text as its parts: plain text, and elements of formulas.
  function parts(text) {
    const made = [];
    let done = 0, count = 0;
    if (typeof katex !== "undefined" && text.length <= LONGEST_TEXT)
      for (const match of text.matchAll(FORMULA)) {
        if (++count > MOST) break;
        made.push(text.slice(done, match.index), formula(match));
        done = match.index + match[0].length;
      }
    return [...made, text.slice(done)].filter((part) => part !== "");
  }
  // Sets an element's text, with formulas; returns the element.
  function write(into, text) { into.replaceChildren(...parts(text)); return into; }
  const found = (text) => text.length <= LONGEST_TEXT && text.search(FORMULA) >= 0;
  const scrolls = (element) => { width.observe(element); return element; };

  document.addEventListener("copy", (event) => {
    const selection = getSelection();
    if (/^(INPUT|TEXTAREA)$/.test(event.target.tagName) || !selection.rangeCount || selection.isCollapsed) return;
    const range = selection.getRangeAt(0).cloneRange();
    const around = (node) => (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement).closest(".math");
    const first = around(range.startContainer), last = around(range.endContainer);
    if (first) range.setStartBefore(first);
    if (last) range.setEndAfter(last);
    const copied = document.createElement("div");
    copied.className = "copied";
    copied.append(range.cloneContents());
    const formulas = copied.querySelectorAll(".math");
    if (!formulas.length) return;
    for (const one of formulas) one.replaceWith(one.dataset.source);
    document.body.append(copied);  // its lines are those of the page
    event.clipboardData.setData("text/plain", copied.innerText);
    copied.remove();
    event.preventDefault();
  });

  return { LONGEST_TEXT, parts, write, found, scrolls };
})();
