"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element, tint, words, around, turnsOf } = chains;
  const EXAMPLE = { problem: "A box holds 12 eggs. Ana buys 3 boxes and breaks 5 eggs. How many whole eggs does she have?",
    response: "Three boxes hold 3 * 12 = 36 eggs.\nShe breaks 5 of them, so 36 - 5 = 29 are whole.\nThe answer is 29." };

  let models = [];                 // of /v1/models
  let asked = null;                // the record that was scored: a chain, pool, tree or trajectory
  let answers = {};                // by model: the answer to it
  let branch = 0;                  // the chain of it that is shown
  let record = null;               // that chain: problem, steps and any further keys; turns of a trajectory
  let scores = {}, before = {};    // by model: of the shown steps, and of the steps before the last change
  let history = [], focused = 0, editing = -1, options = null, sent = 0;
  let stale = false;               // the scores are of the steps before the last change
  let drawing = false;             // steps are replaced: an editor among them is not left by its user
  let fields = null;               // the texts of the fields when they were scored; null of a visit before
  let edited = false;              // the shown steps were edited, and the fields show them
  const KEPT = "jprm playground", MOST_KEPT = 1 << 20;
  const tab = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join("-");  // keeps prefixes
  const { call } = server;

  async function busy(work) {
    at("busy").textContent = "scoring";
    say("");
    try { return await work(); } catch (error) { say(server.said(error)); }
    finally { at("busy").textContent = ""; old(); }
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
      models = (await call("v1/models").catch((error) => {
        if (error.status === 503) setTimeout(load, 1000);  // the models are loading
        throw error;
      })).data;
      const list = (select, first) => select.replaceChildren(...first, ...models.map((one) => new Option(one.id, one.id)));
      list(at("model"), []);
      list(at("other"), [new Option("no other", "")]);
      at("other-choice").hidden = models.length < 2;
      recall();
    });
  }

  // What this page keeps in the browser, so that a visit goes on where the last one ended.
  function keep() {
    const kept = { problem: at("problem").value, response: at("response").value, model: at("model").value, other: at("other").value, asked, answers, branch, focused };
    for (const some of [kept, { ...kept, asked: null, answers: {} }])
      try { const text = JSON.stringify(some); if (text.length <= MOST_KEPT) { localStorage.setItem(KEPT, text); return; } } catch { /* no storage */ }
  }
  function recall() {
    let kept;
    try { kept = JSON.parse(localStorage.getItem(KEPT)); } catch { /* none */ }
    if (!kept) return;
    for (const id of ["problem", "response"]) if (!at(id).value) at(id).value = kept[id] || "";
    for (const id of ["model", "other"]) if ([...at(id).options].some((one) => one.value === kept[id])) at(id).value = kept[id];
    if (kept.asked && chosen().length && chosen().every((name) => (kept.answers || {})[name])) {
      ({ asked, answers, branch, focused } = kept);
      fields = null;
      show();
    }
  }

  // Scores a record by every chosen model. `why` is new, of the fields; changed, of a step; or again, by other models. An
  // answer to an older question is dropped.
  async function score(fresh, why) {
    const number = ++sent, scored = texts();
    await busy(async () => {
      const found = await Promise.all(chosen().map((model) => call("v1/score", { ...fresh, model, prompt_cache_key: tab })));
      if (number !== sent) return;
      const previous = why === "changed" ? scores : {};
      asked = fresh; answers = Object.fromEntries(found.map((answer) => [answer.model, answer]));
      if (why !== "again") branch = why === "new" ? best(found[0]) : 0;
      if (why !== "changed") fields = scored;
      stale = false;
      show();
      if (why === "new" && (at("ask").contains(document.activeElement) || document.activeElement === document.body)) acts.weakest();
      // Steps that were merged, split or removed have no step before to compare with.
      if (Object.values(previous).some((column) => column.length === record.steps.length)) { before = previous; draw(); }
      if (why === "new" && at("result").getBoundingClientRect().top > innerHeight * 0.7) at("result").scrollIntoView();
    });
  }
  const value = (chain) => (chain.score === null ? -Infinity : chain.score);
  const best = ({ chains }) => chains.reduce((top, chain, i) => (value(chain) > value(chains[top]) ? i : top), 0);

  // The chain k of an answer as a record with its scores. A tree's chain goes from a leaf up to the problem.
  function chainOf(answer, k) {
    const whole = answer.record, { samples, nodes, scores: _, outputs: __, ...rest } = whole, problem = whole.problem || at("problem").value;
    const turns = (messages) => { const [steps, around, given] = turnsOf({ messages }); return { record: { problem, steps, turns: around }, scores: given }; };
    if (samples) {
      const { steps, messages, scores: given } = samples[k];
      return messages ? turns(messages) : { record: { problem, steps }, scores: given };
    }
    if (nodes) {
      const path = [];
      for (let i = (answer.chains[k] || { nodes: [] }).nodes.at(-1) ?? -1; i >= 0; i = nodes[i].parent) path.unshift(nodes[i]);
      return path.some((node) => node.role) ? turns(path) : { record: { problem, steps: path.map((node) => node.text) }, scores: path.map((node) => node.score) };
    }
    if (whole.messages && !whole.steps) return turns(whole.messages);
    return { record: rest, scores: whole.scores };
  }
  // Takes the shown chain from the answers.
  function show() {
    const names = chosen().filter((name) => answers[name]), found = names.map((name) => chainOf(answers[name], branch));
    record = found[0].record; before = {};
    scores = Object.fromEntries(names.map((name, i) => [name, found[i].scores]));
    focused = Math.max(0, Math.min(focused, record.steps.length - 1));
    editing = -1; options = null;
    draw();
  }

  // What is in the fields: a record, the first of several, or a solution as text.
  function parsed() {
    const text = at("response").value.trim(), problem = at("problem").value;
    if (!/^[{[]/.test(text)) return { problem, response: text };
    let given;
    try { given = JSON.parse(text); } catch (error) {
      const first = text.split("\n")[0];
      try { given = [JSON.parse(first), ...Array(text.split("\n").filter((line) => line.trim()).length - 1)]; } catch {
        if (/^[{[]\s*["{[]/.test(text)) note(`This begins like a record, and is not JSON (${error.message}): it is scored as text.`);
        return { problem, response: text };
      }
    }
    if (Array.isArray(given)) {
      if (!given[0] || typeof given[0] !== "object") return { problem, response: text };
      if (given.length > 1) note(`${given.length} records: this is the first.`);
      given = given[0];
    }
    if (given.problem) at("problem").value = given.problem;
    return given.messages || given.problem || given.completions || !problem ? given : { problem, ...given };
  }
  function note(text) { at("note").textContent = text; at("note").hidden = !text; }

  function change(steps, to) {
    if (record.turns) { editing = -1; draw(true); say("The turns of a trajectory are not edited here."); return; }
    const same = untouched();
    remember();
    const kept = Object.fromEntries(Object.entries(record).filter(([name]) => !["labels", "correct", "response", "segmentation", "messages"].includes(name)));
    record = { ...kept, steps };
    focused = Math.max(0, Math.min(to, steps.length - 1));
    editing = -1; options = null; stale = true;
    edited = same;
    if (same) { at("response").value = written(steps); fields = texts(); }
    else note("The solution above was changed too, and does not show this edit: Score takes that text, Undo brings the edit back.");
    draw();
    score(record, "changed");
  }
  function remember() { if (asked) history.push({ asked, answers, branch, focused, fields, edited }); }
  const texts = () => ({ problem: at("problem").value, response: at("response").value });
  // Whether the fields are as they were scored: only then an edit or Undo may change them.
  const untouched = () => !!fields && Object.entries(texts()).every(([id, text]) => text === fields[id]);
  // Edited steps as the field of the solution shows them: a record as a record, text as text.
  function written(steps) {
    if (/^\s*[{[]/.test(at("response").value)) return JSON.stringify(record);
    const between = record.segmentation === "paragraphs" || steps.some((step) => step.trim().includes("\n")) ? "\n\n" : "\n";
    return steps.map((step, i) => (i + 1 < steps.length && !/\s$/.test(step) ? step + between : step)).join("");
  }

  function row(text, i, weakest) {
    const made = element("li", i === focused ? "step now" : "step"), names = chosen(), seen = [];
    made.tabIndex = i === focused ? 0 : -1;
    made.append(element("span", "number", `${i + 1}`));
    names.forEach((name, k) => {
      const said = element("div", "said"), score = (scores[name] || [])[i];
      if (score !== undefined && score !== null) {
        const p = probability(name, score), [mark, word] = words(p);
        tint(names.length > 1 ? said : made, p);  // each model's cell in its own colour
        seen.push(p);
        said.append(element("b", "", score.toFixed(2)));
        const old = (before[name] || [])[i];
        if (old !== undefined && Math.abs(score - old) >= 0.005)
          said.append(element("span", `change ${score > old ? "rightmark" : "wrongmark"}`, `${score > old ? "▲" : "▼"} ${Math.abs(score - old).toFixed(2)}`));
        said.append(element("span", mark, word));
      }
      if (k === names.length - 1 && seen.length > 1 && Math.max(...seen) - Math.min(...seen) >= 0.3)
        said.append(element("span", "apart", "models differ"));
      made.append(said);
    });
    const [context, calls] = record.turns ? around(record.turns[i]) : [];
    if (record.turns) made.prepend(context);
    if (i === editing) made.append(editor(text, i));
    else if (record.turns) { const said = element("div"); said.append(markdown.write(element("div", "text"), text), calls); made.append(said); }
    else made.append(markdown.write(element("div", "text"), text));
    if (i === weakest && probability(chosen()[0], scores[chosen()[0]][i]) < 0.5) made.classList.add("weakest");
    if (options && options.at === i) made.append(offered());
    made.addEventListener("focus", () => {
      focused = i;
      for (const other of at("steps").children) { other.tabIndex = other === made ? 0 : -1; other.classList.toggle("now", other === made); }
    });
    made.addEventListener("dblclick", () => { focused = i; acts.edit(); });
    return made;
  }
  function editor(text, i) {
    const made = element("div", "editor"), field = element("textarea"), tools = element("div", "row");
    field.value = text; field.dir = "auto"; field.rows = Math.max(2, Math.ceil(text.length / 60)); field.setAttribute("aria-label", `Step ${i + 1}`);
    let over = false;
    const done = (parts) => {
      if (over) return;
      over = true;
      const kept = parts.map((part) => part.trim()).filter(Boolean);
      if (kept.join("\n") === text || !kept.length) { editing = -1; draw(true); }
      else change([...record.steps.slice(0, i), ...kept, ...record.steps.slice(i + 1)], i);
    };
    const whole = () => done([field.value]), halves = () => done([field.value.slice(0, field.selectionStart), field.value.slice(field.selectionStart)]);
    made.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape") done([text]);
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) whole();
      else if (event.key === "Enter" && event.altKey) { event.preventDefault(); halves(); }
    });
    for (const [name, act] of [["Done", whole], ["Split at the cursor", halves], ["Drop the edit", () => done([text])]]) {
      const button = element("button", "quiet", name);
      button.type = "button";
      button.addEventListener("pointerdown", (event) => event.preventDefault());  // the field keeps its cursor
      button.addEventListener("click", act);
      tools.append(button);
    }
    made.addEventListener("focusout", (event) => { if (!drawing && !made.contains(event.relatedTarget)) whole(); });
    made.append(field, tools);
    return made;
  }
  function offered() {
    const list = element("ol", "options");
    list.append(...options.made.map((one) => {
      const item = element("li"), button = element("button");
      button.type = "button";
      button.append(element("b", "", one.score === null ? "" : (options.whole ? one.score : one.scores[0]).toFixed(2)), markdown.write(element("span"), one.steps.join("\n")));
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
  const weakestOf = (answer) => { const chain = answer.chains[branch]; return chain ? chain.nodes.indexOf(chain.weakest) : -1; };

  function draw(focus) {
    at("result").hidden = !record;
    if (!record) return;
    const names = chosen(), first = answers[names[0]], steps = record.steps;
    const current = !stale && first && !!scores[names[0]];
    const weakest = current ? weakestOf(first) : -1;
    document.body.style.setProperty("--models", names.length);
    at("names").hidden = names.length < 2;
    const problem = markdown.write(at("shown-problem"), record.problem || "");
    problem.hidden = !markdown.found(problem) && !(asked && asked.messages);  // else the field above has all there is to see
    at("names").replaceChildren(element("span"), ...names.map((name) => element("span", "", name)));
    listChains(current && first);
    const had = focus || at("steps").contains(document.activeElement);
    at("steps").classList.toggle("old", !current || !!outdated());
    drawing = true;
    at("steps").replaceChildren(...steps.map((text, i) => row(text, i, weakest)));
    drawing = false;
    if (current) {
      const score = scores[names[0]][weakest], many = first.chains.length > 1;
      const p = weakest < 0 ? 0 : probability(names[0], score), said = words(p)[1].slice(2), which = `step ${weakest + 1}`;
      const lowest = weakest < 0 ? "No step has a score."
        : p < 0.5 ? `${many ? "Its weakest" : "Weakest"} is ${which}: ${said}, ${score.toFixed(2)}.`
        : p < 0.8 ? `No step is below one half; lowest is ${which}: ${said}, ${score.toFixed(2)}.`
        : `${steps.length === 1 ? "Its step is" : `All ${steps.length} steps are`} ${said}; lowest is ${which}, ${score.toFixed(3)}.`;
      const top = best(first);
      const chain = many ? `Chain ${branch + 1} of ${first.chains.length}${branch === top ? " is the best" : `; the best is ${top + 1}`}. ` : "";
      at("verdict").textContent = chain + lowest;
      at("facts").textContent = names.map((name) => `${names.length > 1 ? name + ": " : ""}chain ${figure((answers[name].chains[branch] || {}).score, 3)} by ${answers[name].rule}, ${computed(answers[name].usage)}`).join("; ")
        + `; ${steps.length} ${steps.length === 1 ? "step" : "steps"}${record.segmentation ? ", split by " + record.segmentation : ""}`;
      at("live").textContent = at("verdict").textContent;
    }
    old();
    keep();
    const now = at("steps").children[focused];
    const field = now && now.querySelector("textarea");
    if (field) { field.focus(); field.setSelectionRange(field.value.length, field.value.length); }
    else if (had && now) now.focus();
  }
  const figure = (number, digits) => (typeof number === "number" ? number.toFixed(digits) : "none");

  // The chains of a pool or tree, to choose from.
  function listChains(answer) {
    at("chain-choice").hidden = !(answer && answer.chains.length > 1);
    if (!answer) return;
    const given = answer.record.samples || [], top = best(answer);
    at("chain").replaceChildren(...answer.chains.map((chain, k) => {
      const sample = given[k] || {}, about = [`${k + 1}: ${figure(chain.score, 3)}`];
      if (k === top) about.push("best");
      if (sample.answer !== undefined && sample.answer !== null) about.push(`answer ${sample.answer}`);
      if (typeof sample.correct === "boolean") about.push(sample.correct ? "correct" : "incorrect");
      return new Option(about.join(", "), k, false, k === branch);
    }));
  }

  // Why the scores are not those of what stands in the fields; "" where they are.
  function outdated() {
    if (!asked) return "";
    if (stale) return "Scores of the steps before the last change.";
    if (!fields) return "Kept from your last visit.";
    const changed = ["problem", "response"].some((id) => at(id).value !== fields[id]);
    return changed ? "Scores of the text before you changed it." : "";
  }
  function old() {
    const why = outdated(), busy = at("busy").textContent;
    at("old").hidden = !why || !!busy;
    at("old-why").textContent = why;
    at("steps").classList.toggle("old", !!why);
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
    weakest() { const first = answers[chosen()[0]]; if (first) { focused = Math.max(0, weakestOf(first)); acts.steps(); } },
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
      if (!last) return;
      sent += 1;  // an answer that is under way is to a question that no longer stands
      const same = untouched();
      ({ asked, answers, branch, focused, fields, edited } = last);
      if (same && fields) for (const id of ["problem", "response"]) at(id).value = fields[id];
      stale = false;
      if (chosen().every((name) => answers[name])) { show(); acts.steps(); } else score(asked, "again");
    },
    before() { turn(-1); },
    after() { turn(1); },
    again() { if (stale) score(record, "changed"); else if (fields) at("ask").requestSubmit(); else score(asked, "again"); },
    clear() {
      try { localStorage.removeItem(KEPT); } catch { /* no storage */ }
      for (const id of ["problem", "response"]) at(id).value = "";
      sent += 1;
      [asked, answers, record, scores, before, history, fields, edited] = [null, {}, null, {}, {}, [], null, false];
      note(""); say(""); draw();
      at("problem").focus();
    },
    record() {
      if (!record) return;
      const first = answers[chosen()[0]], alone = !first || (!first.record.samples && !first.record.nodes && !first.record.messages);
      const shown = stale ? record : alone ? { ...record, scores: scores[chosen()[0]] } : first.record;  // old scores are of other steps
      at("record-text").value = JSON.stringify(shown);
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
  function turn(by) {
    const first = answers[chosen()[0]];
    if (!first || stale || !first.chains[branch + by]) return;
    branch += by; focused = 0;
    show();
    acts.steps();
  }
  const keys = { "[": "before", "]": "after", ArrowUp: "up", ArrowDown: "down", k: "up", j: "down", w: "weakest", e: "edit", Enter: "edit", m: "merge", s: "split",
                 x: "remove", a: "alternatives", r: "rewrite", u: "undo", c: "record", "?": "help" };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && at("ask").contains(event.target)) { at("ask").requestSubmit(); return; }
    if (event.key === "Escape" && typing && at("ask").contains(event.target)) { event.target.blur(); acts.steps(); return; }
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
    note("");
    const given = edited && untouched() ? record : parsed();
    if ("response" in given && !given.problem.trim()) { say("Enter a problem."); at("problem").focus(); return; }
    remember();
    focused = 0; editing = -1; options = null; edited = given === record;
    score(given, "new");
  });
  for (const id of ["model", "other"]) at(id).addEventListener("change", () => { if (asked) score(asked, "again"); else keep(); });
  for (const id of ["problem", "response"]) at(id).addEventListener("input", () => { old(); keep(); });
  at("chain").addEventListener("change", () => { branch = Number(at("chain").value); focused = 0; show(); });
  server.asks(load);
  load();
})();
