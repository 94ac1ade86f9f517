"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element } = chains, EVERY_MS = 15000;
  const key = decodeURIComponent(location.hash.slice(1));  // in the part of the address that no request holds

  const percent = (x) => (100 * x).toFixed(0), count = (x) => x.toLocaleString("en");
  function figure(one, form) {
    if (!one || one.value === null) return "";
    return form(one.value) + (one.low === null ? "" : ` [${form(one.low)}, ${form(one.high)}]`);
  }
  const share = (one) => (one ? `${figure(one, percent)} % of ${one.n}` : "none yet");
  const signed = (digits, scale = 1) => (x) => (x < 0 ? "" : "+") + (scale * x).toFixed(digits);
  const ago = (minutes) => (minutes === null ? "" : minutes < 1 ? "now" : minutes < 90 ? `${minutes.toFixed(0)} min` : `${(minutes / 60).toFixed(0)} h`);

  const ROWS = {
    state: (one, stand) => stand.state,
    "last event, ago": (one, stand) => ago(stand.minutes),
    "is on": (one, stand) => (stand.on ? `step ${stand.on.step}: ${stand.on.problem}` : ""),
    tasks: (one) => count(one.tasks),
    steps: (one) => count(one.steps),
    minutes: (one) => one.minutes.toFixed(1),
    "seconds a step, median": (one) => (one.seconds_a_step === null ? "" : one.seconds_a_step.toFixed(1)),
    "known tasks, as known": (one) => share(one.gold),
    "repeated tasks, as before": (one) => share(one.repeats),
    screening: (one) => (one.screening ? `${one.screening.right} of ${one.screening.tasks}, ${one.screening.done} done` : ""),
    "drift: seconds a step": (one) => (one.drift ? figure(one.drift.seconds_a_step, signed(1)) : ""),
    "drift: steps rated wrong, points": (one) => (one.drift ? figure(one.drift.rated_wrong, signed(0, 100)) : ""),
    "skipped, given up, bad problem": (one) => ["skip", "give_up", "bad_problem"].map((reason) => one.finish[reason]).join(" / "),
    flagged: (one) => count(one.flagged),
  };

  function cell(tag, text, scope) {
    const made = element(tag, "", text);
    if (scope) made.scope = scope;
    return made;
  }
  function draw(report) {
    const { tasks, agreement, annotators, anchoring } = report, names = Object.keys(annotators);
    document.title = `${report.name}: ${tasks.labelled} of ${tasks.in_study}`;
    at("name").textContent = report.name;
    at("progress-text").textContent = `${count(tasks.labelled)} of ${count(tasks.in_study)} tasks labelled, ${count(tasks.labelled_twice)} of them twice: ${count(tasks.steps)} steps.`;
    at("progress").value = tasks.in_study ? tasks.labelled / tasks.in_study : 0;
    const two = (x) => x.toFixed(2);
    at("agreement").textContent = agreement.alpha
      ? `Ordinal alpha ${figure(agreement.alpha, two)} over ${count(agreement.steps)} steps that two rated; both or neither call one wrong in ${share(agreement.wrong_or_not)}.`
        + (agreement.first_error ? ` The same first error or none in ${share(agreement.first_error)} chains.` : "")
      : "No step has two ratings yet, so agreement is not computed.";
    at("anchoring").textContent = anchoring
      ? `Shown less hidden scores: first errors as the model's ${figure(anchoring.agreement, signed(0, 100))} points.` : "";
    const head = element("tr");
    head.append(element("td"), ...names.map((name) => cell("th", name, "col")));
    at("heads").replaceChildren(head);
    at("annotators").replaceChildren(...Object.entries(ROWS).map(([what, say]) => {
      const row = element("tr");
      row.append(cell("th", what, "row"), ...names.map((name) => {
        const stand = report.standing[name], made = cell("td", say(annotators[name], stand));
        if (what === "state") made.className = stand.state.split(" ").at(-1);
        if (what === "is on") made.className = "on";
        return made;
      }));
      return row;
    }));
    at("apart").replaceChildren(...agreement.apart.slice(0, 200).map((one) => element("li", "", one.first_error
      ? `Task ${one.task + 1}: ` + Object.entries(one.first_error).map(([name, step]) => `${name}: ${step === null ? "no error" : `step ${step + 1}`}`).join(", ")
      : `Task ${one.task + 1}: ` + Object.entries(one.wrong).map(([step, said]) => `step ${+step + 1}: ` + Object.entries(said).map(([name, wrong]) => `${name} ${wrong ? "wrong" : "not wrong"}`).join(", ")).join("; "))));
    if (!agreement.apart.length) at("apart").append(element("li", "soft", "nowhere so far"));
  }

  async function load() {
    let problem = "";
    try {
      const answer = await fetch("v1/study", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store", redirect: "error" });
      if (answer.status === 401) problem = "The key does not fit. It is part of the link that the server printed.";
      else if (!answer.ok) problem = `The server answers with status ${answer.status}.`;
      else draw(await answer.json());
    } catch { problem = "The server does not answer."; }
    at("alert").textContent = problem;
    at("alert").hidden = !problem;
    at("when").textContent = problem ? "" : `as of ${new Date().toLocaleTimeString()}`;
  }
  load();
  setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) load(); });
})();
