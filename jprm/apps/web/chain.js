"use strict";
// What pages that show chains share: elements of plain text, and the colour and words of a score.
const chains = (() => {
  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;  // never as markup: a step may contain a script tag
    return made;
  }

  // Colours a step by its score as a probability: blue is high, orange low, pale near one half.
  function tint(row, p) {
    const strength = Math.min(1, Math.abs(p - 0.5) * 2), hue = p < 0.5 ? "--lowt" : "--hight";
    row.style.borderLeftColor = `rgba(var(${hue}), ${0.25 + 0.75 * strength})`;
    row.style.backgroundColor = `rgba(var(${hue}), ${0.16 * strength})`;
  }

  // A score as a sign and words, for who does not see colours: [class, text].
  function words(p) {
    if (p >= 0.8) return ["rightmark", "✓ likely right"];
    if (p >= 0.5) return ["rightmark", "✓ leans right"];
    if (p > 0.2) return ["wrongmark", "✗ leans wrong"];
    return ["wrongmark", "✗ likely wrong"];
  }

  // A message or a call beside a turn: one line where it is short, else folded, and opened by a click or Enter.
  function folded(name, text) {
    const line = text.replace(/\s+/g, " ").trim(), long = line.length > 120 || text.trim().includes("\n");
    const made = element(long ? "details" : "p", "context"), head = long ? element("summary") : made;
    head.append(element("b", "", name), long ? ` ${line.slice(0, 100)}… ${text.length} characters` : ` ${line || "(empty)"}`);
    const whole = element("div", "text", text);
    whole.tabIndex = 0;  // scrolls by keys
    if (long) made.append(head, whole);
    return made;
  }

  // What stands before a turn's text (the world's messages and the turn's thoughts), and its calls after it.
  function around(turn) {
    const before = element("div", "before"), calls = element("div", "calls");
    before.append(...turn.before.map(([role, text]) => folded(role, text)));
    if (turn.thoughts) before.append(folded("thoughts", turn.thoughts));
    calls.append(...turn.calls.map(([name, given]) => folded(`calls ${name}`, given)));
    return [before, calls];
  }

  // A trajectory's turns: [texts, what is around each, scores].
  function turnsOf(record) {
    const texts = [], turns = [], scores = [], textOf = (content) => (Array.isArray(content) ? content.map((part) => part.text).join("") : content || "");
    let before = [];
    for (const message of record.messages) {
      const text = textOf(message.content);
      if (message.role !== "assistant") { before.push([message.role, text]); continue; }
      const calls = (message.tool_calls || []).map((call) => call.function || call);
      texts.push(text);
      turns.push({ before, thoughts: message.reasoning_content || "", calls: calls.map((call) => [call.name, typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {})]) });
      scores.push(...(message.scores || [message.score]));
      before = [];
    }
    return [texts, turns, scores];
  }

  return { element, tint, words, folded, around, turnsOf };
})();
