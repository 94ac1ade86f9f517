"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element, around, folded } = chains;
  const WORD = { "-1": "wrong", 0: "neutral", 1: "right" }, SIGN = { "-1": "✗", 0: "–", 1: "✓" };
  const QUESTION = { skip: "Skip this task?", give_up: "Give up on this task?", bad_problem: "Call the problem bad?" };
  const opened = new Set();  // what the annotator opened of what is folded, by its task and its place
  const RETRY_MS = [500, 1000, 2000, 5000, 10000];

  // Who: `#name` or `#name:key` of the address, which no request and no log of a server holds.
  let me = null, store = null;
  // What the server said, and what was done since (`outbox`, oldest first, also in this browser's storage).
  let tasks = [], previous = null, finished = 0, inStudy = 0, screening = null, outbox = [];
  let asked = null;        // an end of the task that waits for Enter
  let cursor = null;       // the alternative that is rated or chosen next
  let problem = "";        // what is wrong with the connection or the disk, in words
  let loaded = false, stopped = false, failures = 0;
  let dry = false;         // the server has no further task for now

  // Time on the current step, without what passes while the page is hidden.
  let spent = 0, since = null, timed = "";
  const clock = { start() { spent = 0; since = document.hidden ? null : performance.now(); },
                  read() { return (spent + (since === null ? 0 : performance.now() - since)) / 1000; } };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && since !== null) { spent += performance.now() - since; since = null; }
    else if (!document.hidden && since === null) since = performance.now();
  });

  const current = () => tasks.find((task) => !task.finish) || null;

  // Where a task stands: the path chosen so far, the alternatives `here`, those `left` to rate, and how it `end`s.
  // As jprm/apps/annotate/tasks.py; the server has the last word.
  function stand(task) {
    const ratings = {}, path = [];
    let here = task.after[0];
    for (const [step, rating] of task.acts) {
      if (rating !== null) ratings[step] = rating;
      if (rating === null || (here.length === 1 && (rating !== -1 || task.around))) { path.push(step); here = task.after[step + 1]; }
    }
    const left = here.filter((step) => ratings[step] === undefined);
    const end = !here.length ? "solution" : !task.around && here.every((step) => ratings[step] === -1) ? "found_error" : null;
    return { ratings, path, here, left, end, several: here.length > 1 };
  }
  function apply(event) {
    let task = tasks.find((one) => one.task === event.task);
    if (!task && previous && previous.task === event.task) { task = previous; tasks.unshift(task); previous = null; }
    if (!task) return;
    if (event.kind === "rate") task.acts.push([event.step, event.rating]);
    else if (event.kind === "choose") task.acts.push([event.step, null]);
    else if (event.kind === "flag") task.flagged = event.on;
    else if (event.kind === "write") task.written = event.text;
    else if (event.kind === "comment") task.comments.push({ step: event.step, text: event.text });
    else if (event.kind === "finish") { task.finish = event.reason; finished += 1; previous = task; tasks = tasks.filter((one) => one !== task); dry = false; }
    else if (task.finish) { task.finish = null; finished -= 1; }
    else { task.acts.pop(); task.written = ""; }
  }

  // The outbox: one entry of storage an event, so that two windows do not overwrite each other's.
  const prefix = () => `jprm annotate ${document.body.dataset.study} ${me.name} `;
  function read() {
    const found = [];
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      if (key.startsWith(prefix())) found.push([key, JSON.parse(localStorage.getItem(key))]);
    }
    return found.sort((a, b) => (a[0] < b[0] ? -1 : 1)).map((pair) => pair[1]);
  }
  const keyOf = (event) => prefix() + event.at + " " + event.uuid;
  let count = 0;
  function act(fields) {
    const event = { uuid: uuid(), at: `${Date.now()}`.padStart(15, "0") + `${count++}`.padStart(6, "0"), ...fields };
    try { store.setItem(keyOf(event), JSON.stringify(event)); }
    catch { say("This browser stores nothing: keep the page open until all is stored on the server."); }
    outbox.push(event);
    apply(event);
    asked = null;
    draw(true);
    pump();
  }
  function drop(event) { outbox = outbox.filter((one) => one !== event); try { store.removeItem(keyOf(event)); } catch { /* never stored */ } }
  function uuid() {  // crypto.randomUUID needs https away from this machine
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  async function call(path, body) {
    const headers = { "Content-Type": "application/json" };
    if (me.key) headers.Authorization = `Bearer ${me.key}`;
    const answer = await fetch(`v1/annotators/${encodeURIComponent(me.name)}/${path}`, {
      method: "POST", headers, body: JSON.stringify(body), cache: "no-store", redirect: "error",
      signal: AbortSignal.timeout(20000) });
    const made = await answer.json().catch(() => ({}));
    return { status: answer.status, made, message: made.error ? made.error.message : `status ${answer.status}` };
  }

  // One at a time: the oldest event until it is acknowledged, then the next tasks. Never in parallel, so that events
  // arrive in their order.
  let pumping = false, timer = 0;
  async function pump() {
    if (pumping || stopped) return;
    pumping = true;
    clearTimeout(timer);
    try {
      while (outbox.length || !loaded || (tasks.length < 2 && !dry))
        if (!(await (outbox.length ? send(outbox[0]) : fetchNext()))) return;
    } finally { pumping = false; status(); }
  }
  async function send(event) {
    const { at: _, ...body } = event;
    let got;
    try { got = await call("events", body); } catch { return later("offline"); }
    if (got.status === 200) { drop(event); failures = 0; problem = ""; status(); return true; }
    if (got.status === 401) { ask("Your key does not fit. It is part of your link."); return false; }
    if (got.status === 400 || got.status === 404 || got.status === 409 || got.status === 413) {
      drop(event);  // it can never be stored: what the server has counts
      say(`Not taken: ${got.message}.`);
      loaded = false;
      return true;
    }
    return later(got.message);
  }
  async function fetchNext() {
    let got;
    try { got = await call("next", {}); } catch { return later("offline"); }
    if (got.status === 401) { ask("Your key does not fit. It is part of your link."); return false; }
    if (got.status === 404) { ask(got.message); return false; }
    if (got.status !== 200) return later(got.message);
    const before = current(), open = before ? before.task + before.acts.length : "";
    ({ tasks, previous, finished, in_study: inStudy, screening } = got.made);
    dry = tasks.length < 2;
    outbox.forEach(apply);  // done while the request was under way
    loaded = true; failures = 0; problem = "";
    const now = current();
    draw(!now || now.task + now.acts.length !== open);
    return true;
  }
  function later(reason) {
    problem = reason;
    clearTimeout(timer);
    timer = setTimeout(pump, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
    status();
    draw(false);
    return false;
  }

  function say(text) { at("alert").textContent = text; at("alert").hidden = !text; }
  function status() {
    const place = at("stored"), waiting = outbox.length;
    place.className = waiting || problem ? "waiting" : "";
    const kept = waiting ? `${waiting} kept in this browser` : "nothing is lost";
    place.textContent = !problem ? (waiting ? `storing ${waiting}` : "all stored") : problem === "offline" ? `offline: ${kept}` : `not stored: ${kept}`;
    if (problem && problem !== "offline") say(problem[0].toUpperCase() + problem.slice(1) + ". It is tried again; keep this page.");
    else if (!problem && /tried again/.test(at("alert").textContent)) say("");
  }

  // A row of the path, of the next step, or of an alternative to it.
  // `shared`: the context before it stands above all alternatives.
  function row(task, step, rating, name, now, shared) {
    const made = element("li", `step${now ? " now" : ""}${rating === undefined ? "" : ` ${WORD[rating]}`}`), said = element("div", "said");
    said.append(element("span", "number", name));
    if (rating !== undefined) said.append(element("span", `${WORD[rating]}mark`, `${SIGN[rating]} ${WORD[rating]}`));
    const [before, calls] = task.around ? around({ ...task.around[step], ...(shared ? { before: [] } : {}) }) : [], text = element("div");
    if (before) text.append(before);
    if (task.steps[step].trim() || !calls) text.append(mathematics.write(element("div", "text"), task.steps[step]));
    if (calls) text.append(calls);
    made.append(said, text);
    keepOpen(made, `${task.task} ${step}`);
    if (task.scores) made.append(element("p", "model", `model: ${task.scores[step].toFixed(2)}`));
    if (now) { made.tabIndex = -1; made.setAttribute("aria-current", "step"); }
    return made;
  }
  function keepOpen(root, name) {
    root.querySelectorAll("details").forEach((fold, i) => {
      fold.dataset.fold = `${name} ${i}`;
      fold.open = opened.has(fold.dataset.fold);
    });
  }
  function alternative(task, now, step, i) {
    const made = row(task, step, now.ratings[step], letter(i), step === cursor && !now.end, common(task, now.here));
    if (!now.left.length && !task.after[step + 1].length) made.append(element("p", "model", "no step follows"));
    made.addEventListener("click", (event) => { if (!getSelection().toString() && !event.target.closest("summary")) to(step); });
    return made;
  }
  // The messages that stand before every one of the alternatives, null where they differ.
  function common(task, here) {
    const all = task.around && here.map((step) => task.around[step].before);
    return all && all.length > 1 && all.every((one) => JSON.stringify(one) === JSON.stringify(all[0])) ? all[0] : null;
  }
  const letter = (i) => String.fromCharCode(65 + i % 26) + (i < 26 ? "" : Math.floor(i / 26));
  // The best rated of the alternatives, and of equals one that a step follows.
  const best = (task, { here, ratings }) => [...here].sort((a, b) => ratings[b] - ratings[a] || !!task.after[b + 1].length - !!task.after[a + 1].length)[0];

  function draw(moved) {
    const task = current();
    at("chain").hidden = at("dock").hidden = !task;
    at("empty").hidden = !loaded || !!task;
    const part = screening && screening.done < screening.tasks ? ", screening" : "";
    at("who").textContent = me ? `${me.name}: ${finished} task${finished === 1 ? "" : "s"} done, ${inStudy} in the study${part}` : "";
    status();
    if (!task) { if (loaded) rest(); return; }
    const now = stand(task), { ratings, path, here, left, end, several } = now, number = path.length + 1;
    if (!here.includes(cursor)) cursor = left.length ? left[0] : best(task, now);
    if (timed !== task.task + task.acts.length) { timed = task.task + task.acts.length; clock.start(); }
    for (const fold of document.querySelectorAll("[data-fold]")) opened[fold.open ? "add" : "delete"](fold.dataset.fold);
    const unit = task.around ? "turn" : "step", Unit = task.around ? "Turn" : "Step";
    at("given").textContent = task.around ? "Task" : "Problem";
    at("solution").firstChild.data = task.around ? "Trajectory " : "Solution ";
    mathematics.write(at("problem"), task.problem);
    at("at-hand").replaceChildren(...(task.tools || []).map(([name, schema]) => folded(`tool ${name}`, schema)));
    keepOpen(at("at-hand"), `${task.task} tools`);
    at("common").replaceChildren(...((several && common(task, here)) || []).map(([role, text]) => folded(role, text)));
    keepOpen(at("common"), `${task.task} ${path.length} common`);
    at("steps").replaceChildren(...path.map((step, i) => row(task, step, ratings[step], `${i + 1}`)));
    if (here.length === 1) at("steps").append(row(task, here[0], ratings[here[0]], end ? `${number}` : `${Unit} ${number}`, !end));
    at("several").hidden = !several;
    at("several").textContent = several ? `${Unit} ${number}: ${here.length} alternatives` : "";
    at("alternatives").replaceChildren(...(several ? here.map((step, i) => alternative(task, now, step, i)) : []));
    at("own").hidden = !(task.written && end === "found_error");
    at("own").replaceChildren(...(task.written ? [element("li", "step right")] : []));
    if (task.written) at("own").firstChild.append(element("div", "said", "yours"), mathematics.write(element("div", "text"), task.written));
    at("open").hidden = !task.around;
    at("write").hidden = end !== "found_error";
    at("comments").replaceChildren(...task.comments.map((one) => element("li", "", one.text)));
    at("comments").hidden = !task.comments.length;
    at("flagged").hidden = !task.flagged;
    at("flag").setAttribute("aria-pressed", task.flagged);
    const choose = !end && !left.length, name = letter(here.indexOf(cursor));
    at("rate").hidden = !!(asked || end); at("end").hidden = !(asked || end || choose);
    const texts = { found_error: several ? `No alternative is acceptable at step ${number}.` : `First error: step ${number}.`,
                    solution: task.around ? `${path.length} turn${path.length === 1 ? "" : "s"}, ${path.filter((step) => ratings[step] === -1).length} rated wrong.`
                      : `No error in ${path.length} step${path.length === 1 ? "" : "s"}.`,
                    choose: ratings[cursor] === -1 && !task.around ? `${name} is wrong: go on with another.` : `Go on with ${name}?` };
    at("end-text").textContent = QUESTION[asked] || texts[end || "choose"];
    at("next").firstChild.data = asked || end ? "Next task " : "Go on ";
    at("next").disabled = !asked && choose && ratings[cursor] === -1 && !task.around;
    if (!moved) return;
    const rated = WORD[ratings[cursor]], step = several ? `Alternative ${name} of ${unit} ${number}${rated ? `, ${rated}` : ""}` : `${Unit} ${number}`;
    const calls = task.around && cursor !== undefined && !end ? task.around[cursor].calls.map(([tool, given]) => ` calls ${tool} ${given}`).join("") : "";
    at("live").textContent = asked || end ? at("end-text").textContent : `${step}: ${task.steps[cursor]}${calls}${choose ? ". " + at("end-text").textContent : ""}`;
    const target = document.querySelector(".step.now") || at(several ? "alternatives" : "steps").lastElementChild;
    if (target) { if (!end) target.focus({ preventScroll: true }); target.scrollIntoView({ block: path.length || several ? "nearest" : "end" }); }
    if (!path.length && here[0] === cursor && !end) scrollTo(0, 0);
  }
  function rest() {
    const failed = screening && screening.passed === false, waiting = problem || outbox.length;
    at("empty-head").textContent = failed ? "Thank you" : waiting ? "Waiting for the server" : "No task left for now";
    at("empty-text").textContent = failed
      ? `You labelled ${screening.right} of ${screening.tasks} screening tasks as expected, which is not enough to go on.`
      : waiting ? "Your ratings are kept in this browser. The next task comes with the connection." : "There is no task for you now. What others have not finished may come back: look here later. Thank you.";
  }

  function rate(rating) {
    const task = current(), now = task && stand(task);
    if (!task || asked || now.end) return;
    const step = cursor, others = [...now.here.slice(now.here.indexOf(step) + 1), ...now.here];
    if (now.left.length) cursor = others.find((one) => one !== step && now.left.includes(one)) ?? null;  // the next to rate
    act({ kind: "rate", task: task.task, step, rating, seconds: clock.read() });
  }
  function to(step) { if (!asked) { cursor = step; draw(true); } }
  function move(by) {
    const task = current(), now = task && stand(task);
    if (now && now.several && !now.end) to(now.here[(now.here.indexOf(cursor) + by + now.here.length) % now.here.length]);
  }
  function end(reason) { if (current()) { asked = reason; draw(false); at("live").textContent = `${QUESTION[reason]} Enter, or undo.`; } }
  // Opens a dialog with a text, and calls `saved` with what the annotator saves.
  function askText(id, field, text, saved) {
    const dialog = at(id), area = at(field);
    area.value = text;
    dialog.onclose = () => {
      area.blur();  // a closed dialog's text keeps the focus until the next frame, and would take the next key
      if (dialog.returnValue === "save") saved(area.value.trim());
    };
    dialog.returnValue = "";
    dialog.showModal();
    area.focus();
  }
  const acts = {
    wrong: () => rate(-1), neutral: () => rate(0), right: () => rate(1),
    before: () => move(-1), after: () => move(1),
    skip: () => end("skip"), give_up: () => end("give_up"), bad_problem: () => end("bad_problem"),
    next() {
      const task = current(), now = task && stand(task), reason = now && (asked || now.end);
      if (reason) { cursor = null; act({ kind: "finish", task: task.task, reason, seconds: clock.read() }); }
      else if (now && !now.left.length && (now.ratings[cursor] !== -1 || task.around)) act({ kind: "choose", task: task.task, step: cursor, seconds: clock.read() });
    },
    undo() {
      const task = current(), last = task && task.acts[task.acts.length - 1];
      if (asked) { asked = null; draw(true); }
      else if (last) { cursor = last[0]; act({ kind: "undo", task: task.task, step: last[0] }); }
      else if (previous) { cursor = null; act({ kind: "undo", task: previous.task }); }
    },
    flag() { const task = current(); if (task) act({ kind: "flag", task: task.task, on: !task.flagged }); },
    comment() {
      const task = current();
      if (!task) return;
      const now = stand(task), step = now.end ? null : cursor, name = now.several ? `alternative ${letter(now.here.indexOf(step))} of ` : "";
      at("comment-on").textContent = step === null ? "On this task" : `On ${name}${task.around ? "turn" : "step"} ${now.path.length + 1}`;
      askText("comment", "comment-text", "", (text) => {
        if (text) act({ kind: "comment", task: task.task, text, ...(step === null ? {} : { step }) });
      });
    },
    open() {
      const folds = [...document.querySelectorAll("#common details, .step.now details")], open = !folds.every((fold) => fold.open);
      for (const fold of folds) fold.open = open;
      const now = document.querySelector(".step.now");
      if (now) now.scrollIntoView({ block: "nearest" });
    },
    write() {
      const task = current();
      if (!task || stand(task).end !== "found_error") return;
      askText("own-step", "own-text", task.written || "", (text) => {
        if (text !== (task.written || "")) act({ kind: "write", task: task.task, text, seconds: clock.read() });
      });
    },
    chain() { at("chain").focus(); },
    help() { if (!at("guidelines").open) at("guidelines").showModal(); },
  };
  const keys = { 1: "wrong", 2: "neutral", 3: "right", Enter: "next", u: "undo", s: "skip", g: "give_up", b: "bad_problem",
                 f: "flag", c: "comment", o: "open", w: "write", "?": "help", h: "help", ArrowUp: "before", ArrowDown: "after" };

  document.addEventListener("keydown", (event) => {
    if (/^(comment|own)-text$/.test(event.target.id) && event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); event.target.closest("form").querySelector(".main").click(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
    if (/^(INPUT|TEXTAREA)$/.test(event.target.tagName) || (event.key === "Enter" && /^(BUTTON|SUMMARY)$/.test(event.target.tagName))) return;
    if (event.key.startsWith("Arrow") && (at("several").hidden || event.target.closest(".context"))) return;  // scrolls
    if (keys[event.key]) { event.preventDefault(); acts[keys[event.key]](); }
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (button) { event.preventDefault(); acts[button.dataset.act](); }
  });
  addEventListener("online", () => { failures = 0; pump(); });

  function ask(why) {
    stopped = true;
    say(why);
    at("enter").hidden = false;
    at("chain").hidden = at("dock").hidden = at("empty").hidden = true;
    at("name").focus();
  }
  at("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = at("name").value.trim() + (at("key").value ? ":" + at("key").value.trim() : "");
    location.reload();
  });
  addEventListener("hashchange", () => location.reload());

  async function begin() {
    const [name, key] = decodeURIComponent(location.hash.slice(1)).split(":");
    fetch("guidelines.txt").then((answer) => answer.text()).then((text) => {
      at("guidelines-text").replaceChildren(...text.trim().split(/\n\s*\n/).map((part) => element("p", "", part)));
    }).catch(() => {});
    if (!name) { ask(""); return; }
    me = { name, key };
    try { store = localStorage; outbox = read(); } catch { outbox = []; }
    status();
    pump();
  }
  begin();
})();
