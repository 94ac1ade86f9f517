"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element, tint, words, around, turnsOf } = chains;
  const EXAMPLE = { problem: "A box holds 12 eggs. Ana buys 3 boxes and breaks 5 eggs. How many whole eggs does she have?",
    response: "Three boxes hold 3 * 12 = 36 eggs.\nShe breaks 5 of them, so 36 - 5 = 29 are whole.\nThe answer is 29." };

  let models = [];                 // of /v1/models
  let record = null;               // what is scored: problem, steps and any further keys
  let scores = {}, before = {};    // by model: of the steps, and of the steps before the last change
  let answers = {};                // by model: the last answer
  let history = [], focused = 0, editing = -1, options = null, asked = 0;
  let stale = false;               // the scores are of the steps before the last change
  const tab = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join("-");  // keeps prefixes
  const { call } = server;

  async function busy(work) {
    at("busy").textContent = "scoring";
    say("");
    try { return await work(); } catch (error) { say(server.said(error)); }
    finally { at("busy").textContent = ""; }
  }
  function say(text) { at("alert").textContent = text; at("alert").hidden = !text; }

  const chosen = () => [at("model").value, at("other").value].filter((name, i, all) => name && all.indexOf(name) === i);
  // A score as a probability, for its colour: a model may score by log odds, or by a difference of two probabilities.
  function probability(name, score) {
    const scale = (models.find((one) => one.id === name) || {}).scale;
    return scale === "sigmoid" ? 1 / (1 + Math.exp(-score)) : scale === "half" ? (1 + score) / 2 : score;
  }

  async function load() {
    await busy(async () => {
      models = (await call("v1/models")).data;
      const list = (select, first) => select.replaceChildren(...first, ...models.map((one) => new Option(one.id, one.id)));
      list(at("model"), []);
      list(at("other"), [new Option("no other", "")]);
      at("other-choice").hidden = models.length < 2;
    });
  }

  // Scores the record by every chosen model. An answer to an older question is dropped.
  async function score(fresh, changed) {
    const number = ++asked;
    await busy(async () => {
      const asks = fresh.turns ? fresh.asked : fresh;  // a trajectory is asked for as it was pasted
      const found = await Promise.all(chosen().map((model) => call("v1/score", { ...asks, model, prompt_cache_key: tab })));
      if (number !== asked) return;
      for (const answer of found)
        if (answer.record.messages && !answer.record.steps) {
          const [steps, turns, given] = turnsOf(answer.record);
          answer.record = { asked: asks, problem: at("problem").value, steps, turns, scores: given };
        }
      // Steps that were merged, split or removed have no step before to compare with.
      before = changed && same(scores, found[0].record.scores.length) ? scores : {};
      stale = false;
      scores = {}; answers = {};
      for (const answer of found) { answers[answer.model] = answer; scores[answer.model] = answer.record.scores; }
      const { scores: _, outputs: __, ...rest } = found[0].record;
      record = rest;
      draw();
    });
  }
  const same = (some, length) => Object.values(some).every((column) => column.length === length);
  function parsed() {
    const text = at("response").value.trim(), problem = at("problem").value;
    if (!text.startsWith("{")) return { problem, response: text };
    try {
      const given = JSON.parse(text);
      if (given && (given.steps || given.response || given.messages)) { if (given.problem) at("problem").value = given.problem; return given; }
    } catch { /* text that begins with a brace */ }
    return { problem, response: text };
  }

  function change(steps, to) {
    if (record.turns) { editing = -1; draw(true); say("The turns of a trajectory are not edited here."); return; }
    history.push({ record, focused });
    const kept = Object.fromEntries(Object.entries(record).filter(([name]) => !["labels", "correct", "response", "segmentation", "messages"].includes(name)));
    record = { ...kept, steps };
    focused = Math.max(0, Math.min(to, steps.length - 1));
    editing = -1; options = null; stale = true;
    draw();
    score(record, true);
  }

  function row(text, i, weakest) {
    const made = element("li", "step"), names = chosen();
    made.tabIndex = i === focused ? 0 : -1;
    made.append(element("span", "number", `${i + 1}`));
    names.forEach((name, k) => {
      const said = element("div", "said"), score = (scores[name] || [])[i];
      if (score !== undefined) {
        const p = probability(name, score), [mark, word] = words(p);
        if (!k) tint(made, p);
        said.append(element("b", "", score.toFixed(2)));
        const old = (before[name] || [])[i];
        if (old !== undefined && Math.abs(score - old) >= 0.005)
          said.append(element("span", `change ${score > old ? "rightmark" : "wrongmark"}`, `${score > old ? "▲" : "▼"} ${Math.abs(score - old).toFixed(2)}`));
        said.append(element("span", mark, word));
      }
      made.append(said);
    });
    const [context, calls] = record.turns ? around(record.turns[i]) : [];
    if (record.turns) made.prepend(context);
    if (i === editing) made.append(editor(text, i));
    else if (record.turns) { const said = element("div"); said.append(mathematics.write(element("div", "text"), text), calls); made.append(said); }
    else made.append(mathematics.write(element("div", "text"), text));
    if (i === weakest) made.classList.add("weakest");
    if (options && options.at === i) made.append(offered());
    made.addEventListener("focus", () => { focused = i; for (const other of at("steps").children) other.tabIndex = other === made ? 0 : -1; });
    made.addEventListener("dblclick", () => { focused = i; acts.edit(); });
    return made;
  }
  function editor(text, i) {
    const field = element("textarea");
    field.value = text; field.rows = Math.max(2, Math.ceil(text.length / 60)); field.setAttribute("aria-label", `Step ${i + 1}`);
    let over = false;
    const done = (parts) => {
      if (over) return;
      over = true;
      const kept = parts.map((part) => part.trim()).filter(Boolean);
      if (kept.join("\n") === text || !kept.length) { editing = -1; draw(true); }
      else change([...record.steps.slice(0, i), ...kept, ...record.steps.slice(i + 1)], i);
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape") done([text]);
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done([field.value]);
      else if (event.key === "Enter" && event.altKey) { event.preventDefault(); done([field.value.slice(0, field.selectionStart), field.value.slice(field.selectionStart)]); }
    });
    field.addEventListener("blur", () => done([field.value]));
    return field;
  }
  function offered() {
    const list = element("ol", "options");
    list.append(...options.made.map((one) => {
      const item = element("li"), button = element("button");
      button.type = "button";
      button.append(element("b", "", one.score === null ? "" : (options.whole ? one.score : one.scores[0]).toFixed(2)), mathematics.write(element("span"), one.steps.join("\n")));
      button.addEventListener("click", () => change(
        [...record.steps.slice(0, options.at), ...one.steps, ...(options.whole ? [] : record.steps.slice(options.at + 1))], options.at));
      item.append(button);
      return item;
    }));
    return list;
  }

  // An edit computes what follows it: the server keeps the rest of this page's last chains.
  function computed(usage) {
    const cached = (usage.prompt_tokens_details || {}).cached_tokens;
    return cached ? `${usage.total_tokens - cached} of ${usage.total_tokens} tokens computed` : `${usage.total_tokens} tokens`;
  }

  // The place among the shown steps of the lowest score: nodes of a trajectory are its messages.
  const weakestOf = (answer) => answer.chains[0].nodes.indexOf(answer.chains[0].weakest);

  function draw(focus) {
    at("result").hidden = !record;
    if (!record) return;
    const names = chosen(), first = answers[names[0]], steps = record.steps;
    const current = !stale && first && !!scores[names[0]];
    const weakest = current ? weakestOf(first) : -1;
    document.body.style.setProperty("--models", names.length);
    at("names").hidden = names.length < 2;
    at("shown-problem").hidden = !mathematics.found(record.problem);  // else the field above has all there is to see
    mathematics.write(at("shown-problem"), record.problem);
    at("names").replaceChildren(element("span"), ...names.map((name) => element("span", "", name)));
    const had = focus || at("steps").contains(document.activeElement);
    at("steps").classList.toggle("old", !current);
    at("steps").replaceChildren(...steps.map((text, i) => row(text, i, weakest)));
    if (current) {
      const score = scores[names[0]][weakest], [, word] = words(probability(names[0], score));
      at("verdict").textContent = `Weakest is step ${weakest + 1}: ${word.slice(2)}, ${score.toFixed(2)}.`;
      at("facts").textContent = names.map((name) => `${names.length > 1 ? name + ": " : ""}chain ${answers[name].chains[0].score.toFixed(3)} by ${answers[name].rule}, ${computed(answers[name].usage)}`).join("; ")
        + `; ${steps.length} steps${record.segmentation ? ", split by " + record.segmentation : ""}`;
      at("live").textContent = at("verdict").textContent;
    }
    const now = at("steps").children[focused];
    const field = now && now.querySelector("textarea");
    if (field) { field.focus(); field.setSelectionRange(field.value.length, field.value.length); }
    else if (had && now) now.focus();
  }

  // Where a step may be split: after a line, else after a sentence; the place nearest its middle.
  function cut(text) {
    for (const pattern of [/\n+/g, /[.!?;]\s+/g, /,\s+/g]) {
      const ends = [...text.matchAll(pattern)].map((match) => match.index + match[0].length).filter((end) => end < text.length);
      if (ends.length) return ends.reduce((a, b) => (Math.abs(b - text.length / 2) < Math.abs(a - text.length / 2) ? b : a));
    }
    return 0;
  }
  async function write(until, n) {
    const step = focused, body = { problem: record.problem, steps: record.steps.slice(0, step), n, until, model: at("model").value, prompt_cache_key: tab };
    const found = await busy(() => call("v1/continue", body));
    if (!found) return;
    const made = found.alternatives.filter((one) => one.steps.length && !one.error);
    made.sort((a, b) => (until === "end" ? b.score - a.score : b.scores[0] - a.scores[0]));
    options = { at: step, made, whole: until === "end" };
    draw(true);
    const first = at("steps").querySelector(".options button");
    if (first) first.focus(); else say("The policy wrote nothing.");
  }

  const acts = {
    steps() { const now = at("steps").children[focused]; if (now) now.focus(); },
    weakest() { const first = answers[chosen()[0]]; if (first) { focused = weakestOf(first); acts.steps(); } },
    edit() { if (record) { editing = focused; draw(true); } },
    merge() {
      const steps = record ? record.steps : [];
      if (focused + 1 < steps.length) change([...steps.slice(0, focused), steps[focused].trimEnd() + "\n" + steps[focused + 1], ...steps.slice(focused + 2)], focused);
    },
    split() {
      const text = record ? record.steps[focused] : "", end = cut(text);
      if (end) change([...record.steps.slice(0, focused), text.slice(0, end).trim(), text.slice(end).trim(), ...record.steps.slice(focused + 1)], focused);
      else if (record) say("This step has no line or sentence to split at: edit it, and press Alt Enter where it is to be split.");
    },
    remove() { if (record && record.steps.length > 1) change(record.steps.filter((_, i) => i !== focused), focused); },
    alternatives() { if (record && document.body.dataset.policy === "yes") write("step", 4); },
    rewrite() { if (record && document.body.dataset.policy === "yes") write("end", 4); },
    undo() {
      const last = history.pop();
      if (last) { ({ record, focused } = last); options = null; editing = -1; stale = true; draw(true); score(record, true); }
    },
    record() {
      if (!record) return;
      at("record-text").value = JSON.stringify(record.turns ? record.asked : { ...record, scores: scores[chosen()[0]] });
      at("record").showModal();
      at("record-text").select();
    },
    async copy() {
      at("record-text").select();
      try { await navigator.clipboard.writeText(at("record-text").value); at("record-head").textContent = "Record, copied"; }
      catch { document.execCommand("copy"); }
    },
    help() { at("help").showModal(); },
    example() { at("problem").value = EXAMPLE.problem; at("response").value = EXAMPLE.response; at("ask").requestSubmit(); },
    up() { focused = Math.max(0, focused - 1); acts.steps(); },
    down() { focused = Math.min(record.steps.length - 1, focused + 1); acts.steps(); },
  };
  const keys = { ArrowUp: "up", ArrowDown: "down", k: "up", j: "down", w: "weakest", e: "edit", Enter: "edit", m: "merge", s: "split",
                 x: "remove", a: "alternatives", r: "rewrite", u: "undo", c: "record", "?": "help" };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && at("ask").contains(event.target)) { at("ask").requestSubmit(); return; }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && !event.target.classList.contains("step")) return;  // a folded message opens
    if (event.key.startsWith("Arrow") && !at("steps").contains(event.target)) return;
    if (event.key === "Escape" && options) { options = null; draw(true); return; }
    if (keys[event.key]) { event.preventDefault(); acts[keys[event.key]](); }
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (button) { event.preventDefault(); acts[button.dataset.act](); }
  });
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    history = []; focused = 0; editing = -1; options = null;
    score(parsed(), false);
  });
  for (const id of ["model", "other"]) at(id).addEventListener("change", () => { if (record) score(record, false); });
  server.asks(load);
  load();
})();
