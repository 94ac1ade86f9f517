"use strict";
(() => {
  const PAGE = 10, { element, tint, around } = chains;
  const data = JSON.parse(document.getElementById("chains").textContent);
  const at = (id) => document.getElementById(id);
  const list = at("list"), search = at("search"), sort = at("sort"), file = at("file"), kind = at("kind");
  const model = at("model"), where = at("where");
  let shown = [], page = 0;

  const ORDERS = ["convincing", "doubted", "step", "models", "lowest"];  // of what items rank by, their `k` for each model

  function choose() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const patterns = words.map((w) => new RegExp(w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i"));
    const inside = new Map();
    const problemHas = (p, k) => {
      const name = p * patterns.length + k;
      if (!inside.has(name)) inside.set(name, patterns[k].test(data.problems[p]));
      return inside.get(name);
    };
    const f = file.value === "" ? null : Number(file.value), m = Number(model.value || 0);
    shown = data.items.filter((item) => {
      if (f !== null && item.f !== f) return false;
      if (kind.value === "wrong" && item.w !== true) return false;
      if (kind.value === "right" && item.w !== false) return false;
      return patterns.every((pattern, k) => problemHas(item.p, k) || item.t.some((text) => pattern.test(text)));
    });
    const order = ORDERS.indexOf(sort.value);
    if (order >= 0) shown.sort((a, b) => b.k[m][order] - a.k[m][order]);  // a stable sort: equal ones as in the files
    page = 0;
    draw();
  }

  function verdict(label) {
    if (label === null) return ["", "no label"];
    if (label > 0.5) return ["rightmark", label === 1 ? "✓ right" : "✓ " + label.toFixed(2)];
    if (label < 0.5) return ["wrongmark", label === 0 ? "✗ wrong" : "✗ " + label.toFixed(2)];
    return ["", "· neutral"];
  }

  // A score as a probability, for its colour; and in words, if there is one.
  const WEIGHTS = { score: (p) => p, half: (p) => (1 + p) / 2, sigmoid: (p) => 1 / (1 + Math.exp(-p)) };
  const weight = (m) => WEIGHTS[(data.weights || [])[m] || "score"];
  const said = (score) => (score === null ? "no score" : score.toFixed(3));

  function lowestOf(scores) {
    return scores.reduce((low, score, i) => (score !== null && (low < 0 || score < scores[low]) ? i : low), -1);
  }

  function step(item, i, m) {
    const row = element("li", "step"), words = element("div", "said"), score = item.c[m][i];
    if (score !== null) tint(row, weight(m)(score));
    if (item.d) row.style.marginLeft = Math.min(item.d[i], 12) * 0.75 + "rem";
    words.append(element("span", "", said(score)));
    if (i === lowestOf(item.c[m]) && item.t.length > 1 && weight(m)(score) < 0.5) { row.classList.add("lowest"); words.append(element("b", "", "lowest")); }
    const [mark, label] = verdict(item.l[i]);
    if (item.l.some((one) => one !== null)) words.append(element("span", mark, label));
    if (item.c.length > 1)
      item.c.forEach((scores, k) => { if (k !== m) words.append(element("span", "soft", `${data.models[k]}: ${said(scores[i])}`)); });
    const body = element("div");
    const [before, calls] = item.m ? around(item.m[i]) : ["", ""];
    body.append(mathematics.write(element("div", "text"), item.t[i]), calls);
    for (const [at, status, tokens, text] of item.j ? item.j[m] : [])
      if (at === i) {
        const critique = element("details");
        critique.append(element("summary", "", `critique, ${tokens} tokens${status === "read" ? "" : ": " + status}`));
        critique.append(mathematics.write(element("div", "text"), text));
        body.append(critique);
      }
    row.append(before, words, body);
    return row;
  }

  function draw() {
    const m = Number(model.value || 0), pages = Math.max(1, Math.ceil(shown.length / PAGE));
    page = Math.max(0, Math.min(page, pages - 1));
    list.replaceChildren(...shown.slice(page * PAGE, (page + 1) * PAGE).map((item, i) => {
      const card = element("article");
      card.tabIndex = -1;
      const known = item.m ? ["solved", "not solved"] : ["answer right", "answer wrong"];
      const outcome = item.o === null || item.o === undefined ? "" : `, ${known[item.o ? 0 : 1]}`;
      const one = item.m ? "run" : "chain";
      const what = item.d ? "tree" : item.l.every((label) => label === null) ? one : `${one} ${item.w ? "with" : "without"} an error`;
      card.setAttribute("aria-label", `${page * PAGE + i + 1} of ${shown.length}`);
      const times = item.n ? `, ${item.n} equal ones` : "";
      card.append(element("p", "soft", `${page * PAGE + i + 1}. ${data.files[item.f]}${item.r ? `:${item.r}` : ""}: ${what}${outcome}${times}`));
      card.append(mathematics.write(element("p", "problem"), data.problems[item.p]));
      const steps = element("ol"), low = lowestOf(item.c[m]);
      steps.append(...item.t.map((_, k) => step(item, k, m)));
      if (low >= 0 && item.t.length > 1) {
        const to = element("button", "", `lowest: ${item.m ? "turn" : "step"} ${low + 1} of ${item.t.length}, ${said(item.c[m][low])}`);
        to.type = "button";
        to.addEventListener("click", () => steps.children[low].scrollIntoView({ block: "center" }));
        card.append(to);
      }
      card.append(steps);
      return card;
    }));
    where.textContent = shown.length ? `${shown.length} of ${data.items.length}, page ${page + 1} of ${pages}` : "none matches";
    for (const id of ["first", "back"]) at(id).disabled = page === 0;
    for (const id of ["next", "last"]) at(id).disabled = page >= pages - 1;
  }

  function turn(to) { page = to; draw(); at("chain-browser").scrollIntoView(); }
  function focusCard(by) {
    const cards = [...list.children], now = cards.indexOf(document.activeElement);
    const to = cards[Math.max(0, Math.min(cards.length - 1, now + by))];
    if (to) to.focus();
  }

  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(choose, 150); });
  for (const control of [sort, file, kind, model]) control.addEventListener("change", choose);
  at("first").addEventListener("click", () => turn(0));
  at("back").addEventListener("click", () => turn(page - 1));
  at("next").addEventListener("click", () => turn(page + 1));
  at("last").addEventListener("click", () => turn(Infinity));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "Escape" && document.activeElement === search) { search.value = ""; search.blur(); choose(); return; }
    if (typing) return;
    const act = { "/": () => search.focus(), n: () => turn(page + 1), p: () => turn(page - 1),
                  j: () => focusCard(1), k: () => focusCard(-1) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  // Tables as text: Markdown for issues, LaTeX for papers (booktabs), CSV for everything else.
  const cells = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  const LATEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--", "<": "$<$", ">": "$>$" };
  const latex = (text) => text.replace(/[&%$#_{}]|[\\~^–<>]/g, (one) => LATEX[one] || "\\" + one).replace(/^[+-]\d.*/, "$$$&$$");
  const forms = {
    Markdown: (rows) => rows.flatMap((row, i) => [row, ...(i ? [] : [row.map((_, k) => (k ? "--:" : "---"))])])
      .map((row) => `| ${row.map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |\n`).join(""),
    LaTeX: (rows) => {
      const [head, ...body] = rows.map((row) => row.map(latex).join(" & ") + " \\\\\n");
      return `\\begin{tabular}{l${"r".repeat(rows[0].length - 1)}}\n\\toprule\n${head}\\midrule\n${body.join("")}\\bottomrule\n\\end{tabular}\n`;
    },
    CSV: (rows) => rows.map((row) => row.map((cell) => (/[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join(",") + "\n").join(""),
  };
  async function copy(text) {
    try { await navigator.clipboard.writeText(text); return; } catch { /* an older browser, or no permission */ }
    const area = document.body.appendChild(element("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  for (const scroll of document.querySelectorAll("section .scroll")) {
    const bar = element("p", "copy soft", "Copy as ");
    for (const name of Object.keys(forms)) {
      const button = element("button", "", name);
      button.type = "button";
      button.setAttribute("aria-label", `Copy ${scroll.getAttribute("aria-label")} as ${name}`);
      button.addEventListener("click", async () => {
        await copy(forms[name](cells(scroll.querySelector("table"))));
        button.textContent = "copied";
        setTimeout(() => { button.textContent = name; }, 1500);
      });
      bar.append(button);
    }
    scroll.after(bar);
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
  choose();
})();
