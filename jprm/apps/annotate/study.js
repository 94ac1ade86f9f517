"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element } = chains, EVERY_MS = 15000;
  const key = decodeURIComponent(location.hash.slice(1));  // in the part of the address that no request holds

  function row(cells, scope) {
    const made = element("tr"), [what] = cells;
    made.append(...cells.map((text, i) => {
      const head = scope === "col" ? text : !i, cell = element(head ? "th" : "td", "", text);
      if (head) cell.scope = scope;
      else if (what === "state") cell.className = text.split(" ").at(-1);
      else if (what === "working on") cell.className = "on";
      return cell;
    }));
    return made;
  }
  function draw(report) {
    const { tasks, agreement, table, said } = report, [progress, ...others] = said;
    document.title = `${report.name}: ${tasks.labelled} of ${tasks.in_study}`;
    at("name").textContent = report.name;
    at("progress-text").textContent = progress;
    at("progress").value = tasks.in_study ? tasks.labelled / tasks.in_study : 0;
    at("said").replaceChildren(...others.map((text) => element("p", "", text)));
    at("heads").replaceChildren(row(table.columns, "col"));
    at("annotators").replaceChildren(...table.rows.map((cells) => row(cells, "row")));
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
