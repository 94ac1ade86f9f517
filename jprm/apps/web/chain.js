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

  return { element, tint, words };
})();
