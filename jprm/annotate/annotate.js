"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element } = chains;
  const WORD = { "-1": "wrong", 0: "neutral", 1: "right" }, SIGN = { "-1": "✗", 0: "–", 1: "✓" };
  const QUESTION = { skip: "Skip this chain?", give_up: "Give up on this chain?", bad_problem: "Call the problem bad?" };
  const RETRY_MS = [500, 1000, 2000, 5000, 10000];

  // Who: `#name` or `#name:key` of the address, which no request and no log of a server holds.
  let me = null, store = null;
  // What the server said, and what was done since (`outbox`, oldest first, also in this browser's storage).
  let tasks = [], previous = null, finished = 0, screening = null, outbox = [];
  let asked = null;        // an end of the chain that waits for Enter
  let problem = "";        // what is wrong with the connection or the disk, in words
  let loaded = false, stopped = false, failures = 0;
  let dry = false;         // the server has no further chain for now

  // Time on the current step, without what passes while the page is hidden.
  let spent = 0, since = null;
  const clock = { start() { spent = 0; since = document.hidden ? null : performance.now(); },
                  read() { return (spent + (since === null ? 0 : performance.now() - since)) / 1000; } };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && since !== null) { spent += performance.now() - since; since = null; }
    else if (!document.hidden && since === null) since = performance.now();
  });

  const current = () => tasks.find((task) => !task.finish) || null;
  const wrong = (task) => task.ratings[task.ratings.length - 1] === -1;
  const complete = (task) => (wrong(task) ? "found_error" : task.ratings.length === task.steps.length ? "solution" : null);

  // As jprm/annotate/tasks.py; the server has the last word.
  function apply(event) {
    let task = tasks.find((one) => one.task === event.task);
    if (!task && previous && previous.task === event.task) { task = previous; tasks.unshift(task); previous = null; }
    if (!task) return;
    if (event.kind === "rate") task.ratings.push(event.rating);
    else if (event.kind === "flag") task.flagged = event.on;
    else if (event.kind === "comment") task.comments.push({ step: event.step, text: event.text });
    else if (event.kind === "finish") { task.finish = event.reason; finished += 1; previous = task; tasks = tasks.filter((one) => one !== task); dry = false; }
    else if (task.finish) { task.finish = null; finished -= 1; }
    else task.ratings.pop();
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

  // One at a time: the oldest event until it is acknowledged, then the next chains. Never in parallel, so that events
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
    const before = current(), open = before ? before.task + before.ratings.length : "";
    ({ tasks, previous, finished, screening } = got.made);
    dry = tasks.length < 2;
    outbox.forEach(apply);  // done while the request was under way
    loaded = true; failures = 0; problem = "";
    const now = current();
    draw(!now || now.task + now.ratings.length !== open);
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

  function stepRow(task, i) {
    const rating = task.ratings[i], now = rating === undefined, row = element("li", `step ${now ? "now" : WORD[rating]}`);
    const said = element("div", "said");
    said.append(element("span", "number", now ? `Step ${i + 1}` : `${i + 1}`));
    if (!now) said.append(element("span", `${WORD[rating]}mark`, `${SIGN[rating]} ${WORD[rating]}`));
    row.append(said, mathematics.write(element("div", "text"), task.steps[i]));
    if (task.scores) row.append(element("p", "model", `model: ${task.scores[i].toFixed(2)}`));
    if (now) { row.tabIndex = -1; row.setAttribute("aria-current", "step"); }
    return row;
  }

  function draw(moved) {
    const task = current();
    at("chain").hidden = at("dock").hidden = !task;
    at("empty").hidden = !loaded || !!task;
    const part = screening && screening.done < screening.chains ? ", screening" : "";
    at("who").textContent = me ? `${me.name}: ${finished} chain${finished === 1 ? "" : "s"} done${part}` : "";
    status();
    if (!task) { if (loaded) rest(); return; }
    mathematics.write(at("problem"), task.problem);
    const shown = Math.min(task.ratings.length + (complete(task) ? 0 : 1), task.steps.length);
    at("steps").replaceChildren(...task.steps.slice(0, shown).map((_, i) => stepRow(task, i)));
    at("comments").replaceChildren(...task.comments.map((one) => element("li", "", one.text)));
    at("comments").hidden = !task.comments.length;
    at("flagged").hidden = !task.flagged;
    at("flag").setAttribute("aria-pressed", task.flagged);
    const end = asked || complete(task);
    at("rate").hidden = !!end; at("end").hidden = !end;
    const errors = { found_error: `First error: step ${task.ratings.length}.`, solution: `No error in ${task.steps.length} step${task.steps.length === 1 ? "" : "s"}.` };
    at("end-text").textContent = end ? QUESTION[end] || errors[end] : "";
    if (!moved) return;
    clock.start();
    const step = task.ratings.length;
    at("live").textContent = end ? at("end-text").textContent : `Step ${step + 1}: ${task.steps[step]}`;
    const row = end ? at("steps").lastElementChild : at("steps").querySelector(".now");
    if (row) { if (!end) row.focus({ preventScroll: true }); row.scrollIntoView({ block: step ? "nearest" : "end" }); }
    if (!step && !end) scrollTo(0, 0);
  }
  function rest() {
    const failed = screening && screening.passed === false, waiting = problem || outbox.length;
    at("empty-head").textContent = failed ? "Thank you" : waiting ? "Waiting for the server" : "All done";
    at("empty-text").textContent = failed
      ? `You labelled ${screening.right} of ${screening.chains} screening chains as expected, which is not enough to go on.`
      : waiting ? "Your ratings are kept in this browser. The next chain comes with the connection." : "There is no further chain for you. Thank you.";
  }

  function rate(rating) {
    const task = current();
    if (task && !asked && !complete(task)) act({ kind: "rate", task: task.task, step: task.ratings.length, rating, seconds: clock.read() });
  }
  function end(reason) { if (current()) { asked = reason; draw(false); at("live").textContent = `${QUESTION[reason]} Enter, or undo.`; } }
  const acts = {
    wrong: () => rate(-1), neutral: () => rate(0), right: () => rate(1),
    skip: () => end("skip"), give_up: () => end("give_up"), bad_problem: () => end("bad_problem"),
    next() {
      const task = current(), reason = task && (asked || complete(task));
      if (reason) act({ kind: "finish", task: task.task, reason, seconds: clock.read() });
    },
    undo() {
      const task = current();
      if (asked) { asked = null; draw(true); }
      else if (task && task.ratings.length) act({ kind: "undo", task: task.task, step: task.ratings.length - 1 });
      else if (previous) act({ kind: "undo", task: previous.task });
    },
    flag() { const task = current(); if (task) act({ kind: "flag", task: task.task, on: !task.flagged }); },
    comment() {
      const task = current();
      if (!task) return;
      const step = complete(task) ? null : task.ratings.length;
      at("comment-on").textContent = step === null ? "On this chain" : `On step ${step + 1}`;
      at("comment-text").value = "";
      const dialog = at("comment");
      dialog.onclose = () => {
        const text = at("comment-text").value.trim();
        if (dialog.returnValue === "save" && text) act({ kind: "comment", task: task.task, text, ...(step === null ? {} : { step }) });
      };
      dialog.returnValue = "";
      dialog.showModal();
      at("comment-text").focus();
    },
    chain() { at("chain").focus(); },
    help() { if (!at("guidelines").open) at("guidelines").showModal(); },
  };
  const keys = { 1: "wrong", 2: "neutral", 3: "right", Enter: "next", u: "undo", s: "skip", g: "give_up", b: "bad_problem",
                 f: "flag", c: "comment", "?": "help", h: "help" };

  document.addEventListener("keydown", (event) => {
    if (event.target.id === "comment-text" && event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("comment-save").click(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
    if (/^(INPUT|TEXTAREA)$/.test(event.target.tagName) || (event.key === "Enter" && event.target.tagName === "BUTTON")) return;
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
