"use strict";
(() => {
  const at = (id) => document.getElementById(id), { element } = chains, HEIGHT = 220, EVERY = 3000;
  const PLOTS = [
    { title: "Loss", curves: ["loss", "valid_loss"] },
    { title: "AUROC", curves: ["auroc", "valid_auroc"] },
    { title: "Right answers, and the PRM's score", curves: ["gold", "proxy"], held: true },
    { title: "Goodput: part of the time that trains", curves: ["goodput"] },
    { title: "Tokens a second", curves: ["tokens_per_second"] },
    { title: "MFU: part of the devices' published rate", curves: ["mfu"] },
    { title: "Seconds a step: the median, and one of twenty takes longer than", curves: ["step_seconds_p50", "step_seconds_p95"] },
  ];
  const LABELS = { valid_loss: "held out", valid_auroc: "held out", gold: "right answers", proxy: "PRM's lowest score", step_seconds_p50: "median", step_seconds_p95: "95th percentile" };
  const runs = new Map();          // by name: what the server says of a run, and its lines so far
  const hidden = new Set();
  let plots = [], logarithmic = false, failures = 0, timer = 0, heads = [], leftOut = [];
  const weight = () => Number(at("smooth").value), inHours = () => at("axis").value === "hours";
  const place = (x) => (inHours() ? `${short(x)} h` : `step ${x}`);

  function drawn(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3))));
  function since(seconds) {
    if (seconds === null) return "nothing written yet";
    if (seconds < 90) return `wrote ${Math.round(seconds)} s ago`;
    return seconds < 5400 ? `wrote ${Math.round(seconds / 60)} min ago` : `wrote ${Math.round(seconds / 3600)} h ago`;
  }

  // Reads what the runs have written since the last time. A file that was replaced begins anew.
  async function read() {
    let changed = false;
    const { data: list, left_out: out } = await server.call("v1/runs");
    heads = list.length ? Object.keys(list[0].settings) : [];
    leftOut = out;
    for (const name of runs.keys()) if (!list.some((one) => one.id === name)) { runs.delete(name); changed = true; }
    for (const [i, said] of list.entries()) {
      if (!runs.has(said.id)) { runs.set(said.id, { lines: [], file: "", next: 0, damaged: 0, clock: 0 }); changed = true; }
      const run = Object.assign(runs.get(said.id), said, { colour: i % 8 });
      for (let more = true; more;) {
        const query = new URLSearchParams({ run: said.id, file: run.file, from: run.next });
        const got = await server.call(`v1/runs/metrics?${query}`);
        if (got.from === 0 && run.lines.length) { run.lines = []; run.damaged = 0; run.clock = 0; changed = true; }
        for (const line of got.lines) {
          run.clock += line.seconds || 0;  // of the steps since the line before
          run.lines.push({ ...line, hours: run.clock / 3600 });
        }
        run.damaged += got.damaged;
        changed = changed || got.lines.length > 0;
        more = got.next > run.next && got.next < got.end;
        run.file = got.file; run.next = got.next;
      }
    }
    return changed;
  }
  async function turn() {
    clearTimeout(timer);
    try {
      const changed = await read();
      if (failures) say("");
      failures = 0;
      table();
      if (changed) draw();
    } catch (error) { failures += 1; say(server.said(error)); }
    timer = setTimeout(() => (document.hidden ? undefined : turn()), EVERY * Math.min(10, 1 + failures));
  }
  function say(text) { at("alert").textContent = text; at("alert").hidden = !text; }

  function table() {
    const rows = [...runs.values()].map((run) => {
      const row = element("tr", `c${run.colour}`), name = element("th"), label = element("label"), box = element("input");
      name.scope = "row"; box.type = "checkbox"; box.checked = !hidden.has(run.id);
      box.addEventListener("change", () => show(run.id));
      label.append(box, element("span", "swatch"), element("span", "", run.id));
      name.append(label);
      const step = run.lines.reduce((most, line) => Math.max(most, line.step || 0), 0);
      const whole = run.steps !== null && step >= run.steps;
      const loss = run.lines.reduce((last, line) => (typeof line.loss === "number" ? line.loss : last), null);
      row.append(name, element("td", "state", (whole ? "finished" : since(run.quiet_seconds)) + (run.damaged ? `; ${run.damaged} damaged lines left out` : "")),
        element("td", "", run.steps === null ? `${step}` : `${step} of ${run.steps}`), element("td", "", loss === null ? "" : short(loss)),
        ...heads.map((head) => element("td", "", run.settings[head])));
      return row;
    });
    const head = element("tr");
    head.append(...["Run", "State", "Step", "Loss", ...heads].map((text) => { const made = element("th", text === "State" ? "state" : "", text); made.scope = "col"; return made; }));
    at("heads").replaceChildren(head);
    at("left-out").replaceChildren(...leftOut.slice(0, 10).map((text) => element("li", "", `Not shown: ${text}`)));
    at("left-out").hidden = !leftOut.length;
    const focused = [...at("runs").querySelectorAll("input")].indexOf(document.activeElement);
    at("runs").replaceChildren(...rows);
    if (focused >= 0 && rows[focused]) rows[focused].querySelector("input").focus();
  }
  function show(name) {
    if (!hidden.delete(name)) hidden.add(name);
    table();
    draw();
  }

  // The curve of a metric: [step, value] of the lines that have it, or only of evaluations on held-out problems.
  const points = (run, metric, held) => run.lines.filter((line) => metric in line && "step" in line && (!held || "gold" in line))
    .map((line) => [inHours() ? line.hours : line.step, line[metric]]);
  // An exponential mean whose first values are not drawn towards 0.
  function smoothed(points, kept) {
    let sum = 0, mass = 0;
    return points.map(([x, value]) => { sum = kept * sum + (1 - kept) * value; mass = kept * mass + 1 - kept; return [x, sum / mass]; });
  }
  function curvesOf(plot) {
    const found = [];
    for (const run of runs.values())
      if (!hidden.has(run.id))
        plot.curves.forEach((metric, k) => {
          const some = points(run, metric, plot.held);
          if (some.length) found.push({ run, metric, second: k > 0, raw: weight() ? some : null, points: weight() ? smoothed(some, weight()) : some });
        });
    return found;
  }
  const name = (curve) => [runs.size > 1 ? curve.run.id : "", LABELS[curve.metric] || (curve.second ? curve.metric : "")].filter(Boolean).join(", ");

  function draw() {
    const known = new Set(PLOTS.flatMap((plot) => plot.curves)), others = new Set();
    for (const run of runs.values()) for (const line of run.lines) for (const metric of Object.keys(line)) if (!known.has(metric) && metric !== "step" && metric !== "hours") others.add(metric);
    const wanted = [...PLOTS.map((plot) => [plot, at("plots")]), ...[...others].sort().map((metric) => [{ title: metric.replaceAll("_", " "), curves: [metric] }, at("further")])];
    const before = new Map(plots.map((plot) => [plot.title, plot]));
    plots = wanted.map(([plot, into]) => ({ ...plot, into, curves: plot.curves, found: curvesOf(plot) })).filter((plot) => plot.found.length)
      .map((plot) => Object.assign(before.get(plot.title) || frame(plot), { found: plot.found }));
    for (const into of ["plots", "further"]) {
      const figures = plots.filter((plot) => plot.into.id === into).map((plot) => plot.figure);
      if (figures.some((figure, i) => at(into).children[i] !== figure) || at(into).children.length !== figures.length) at(into).replaceChildren(...figures);
    }
    at("more").hidden = !at("further").children.length;
    at("legend").textContent = plots.length ? "Where a plot has two kinds of curve, the second is dashed." + (logarithmic ? " Axes are logarithmic where values differ by a factor of 4 and more." : "") : "No run has written metrics yet. The page looks again every 3 seconds.";
    const away = [...hidden].filter((one) => runs.has(one));
    if (weight()) at("legend").textContent += ` Pale curves are the values, the others their running mean (${weight()}).`;
    if (away.length) at("legend").textContent += ` Hidden, by their boxes or keys: ${away.join(", ")}.`;
    plots.forEach(paint);
  }
  function frame(plot) {
    const figure = element("figure"), svg = drawn("svg", { role: "img", tabindex: 0 }), readout = element("p");
    readout.setAttribute("aria-live", "polite");
    figure.append(element("figcaption", "", plot.title), svg, readout);
    const made = { title: plot.title, into: plot.into, figure, svg, readout, step: null, own: false };
    svg.addEventListener("pointermove", (event) => { made.step = nearest(made, event.offsetX); paint(made); });
    svg.addEventListener("pointerleave", () => { if (document.activeElement !== svg) { made.step = null; paint(made); } });
    svg.addEventListener("blur", () => { made.step = null; paint(made); });
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], steps = stepsOf(made);
      if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const now = made.step === null ? (by > 0 ? -1 : steps.length) : steps.indexOf(made.step);
      made.step = steps[Math.max(0, Math.min(steps.length - 1, now + by * (event.shiftKey ? 10 : 1)))];
      paint(made);
    });
    return made;
  }
  const stepsOf = (plot) => [...new Set(plot.found.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  function nearest(plot, x) {
    const steps = stepsOf(plot);
    return plot.scale ? steps.reduce((best, step) => (Math.abs(plot.scale(step) - x) < Math.abs(plot.scale(best) - x) ? step : best), steps[0]) : null;
  }

  // Round numbers from low to high: about five of them.
  function ticks(low, high) {
    const raw = (high - low || 1) / 4, power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
    const made = [];
    for (let tick = Math.ceil(low / unit); tick * unit <= high + unit * 1e-9; tick += 1) made.push(tick * unit);
    return made;
  }
  const powers = (low, high) => {
    const made = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) for (const m of [1, 2, 5]) if (m * 10 ** k >= low && m * 10 ** k <= high) made.push(m * 10 ** k);
    return made.length > 8 ? made.filter((tick) => Number.isInteger(Math.round(Math.log10(tick) * 1e9) / 1e9)) : made;
  };
  // At most a low and a high point for each pixel: a long run has more points than the screen.
  function thinned(points, width) {
    if (points.length <= 2 * width) return points;
    const size = Math.ceil(points.length / width), made = [];
    for (let i = 0; i < points.length; i += size) {
      const some = points.slice(i, i + size), low = some.reduce((a, b) => (b[1] < a[1] ? b : a)), high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
      made.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
    }
    return made;
  }

  function paint(plot) {
    const { svg, found } = plot, width = svg.clientWidth || 400, left = 48, right = 10, top = 8, bottom = 24;
    const all = found.flatMap((curve) => curve.raw || curve.points);
    const most = (k, pick) => all.reduce((best, point) => pick(best, point[k]), all[0][k]);
    // Within a factor of 4 there would be hardly a tick, and the curve looks the same.
    const log = logarithmic && most(1, Math.min) > 0 && most(1, Math.max) > 4 * most(1, Math.min), f = log ? Math.log10 : (y) => y;
    const first = Math.min(0, most(0, Math.min)), last = Math.max(first + (inHours() ? 1e-3 : 1), most(0, Math.max));
    let low = most(1, Math.min), high = most(1, Math.max);
    if (low === high) { low -= log ? low / 2 : Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    const margin = (f(high) - f(low)) * 0.04, floor = f(low) - margin, ceiling = f(high) + margin;
    const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
    const y = (value) => HEIGHT - bottom - ((f(value) - floor) / (ceiling - floor)) * (HEIGHT - top - bottom);
    plot.scale = x;
    const parts = [];
    const round = log ? powers(low, high) : [];
    for (const tick of round.length > 2 ? round : log ? ticks(low, high) : ticks(floor, ceiling)) {
      parts.push(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      parts.push(drawn("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    for (const tick of ticks(first, last)) parts.push(drawn("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": x(tick) > width - 30 ? "end" : "middle" }, short(tick)));
    for (const curve of found) {
      const some = thinned(curve.points, width), kind = `c${curve.run.colour}${curve.second ? " second" : ""}`;
      if (curve.raw) parts.push(drawn("path", { class: `curve raw ${kind}`, d: thinned(curve.raw, width).map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("") }));
      const d = some.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      parts.push(drawn("path", { class: `curve ${kind}`, d }));
      if (some.length < 2) parts.push(drawn("circle", { class: `dot ${kind}`, cx: x(some[0][0]), cy: y(some[0][1]), r: 3 }));
    }
    if (plot.step !== null) {
      parts.push(drawn("line", { class: "cursor", x1: x(plot.step), x2: x(plot.step), y1: top, y2: HEIGHT - bottom }));
      for (const curve of found)
        for (const [step, value] of curve.points) if (step === plot.step) parts.push(drawn("circle", { class: `dot c${curve.run.colour}`, cx: x(step), cy: y(value), r: 3.5 }));
    }
    svg.replaceChildren(...parts);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const says = found.map((curve) => {
      const point = plot.step === null ? curve.points.at(-1) : curve.points.find((one) => one[0] === plot.step);
      return point ? `${name(curve)} ${short(point[1])}`.trim() : "";
    }).filter(Boolean).join("; ");
    const text = plot.step === null ? `last: ${says}` : `${place(plot.step)}: ${says}`;
    if (plot.readout.textContent !== text) plot.readout.textContent = text;
    plot.readout.setAttribute("aria-live", plot.step === null ? "off" : "polite");
    svg.setAttribute("aria-label", `${plot.title}, ${inHours() ? "hours" : "steps"} ${short(first)} to ${short(last)}; ${says}`);
  }

  const acts = {
    help() { at("help").showModal(); },
    next() { focusPlot(1); },
    previous() { focusPlot(-1); },
    logarithmic() { logarithmic = !logarithmic; draw(); },
    smooth() { at("smooth").selectedIndex = (at("smooth").selectedIndex + 1) % at("smooth").options.length; draw(); },
    axis() { at("axis").selectedIndex = 1 - at("axis").selectedIndex; moved(); },
  };
  function focusPlot(by) {
    const shown = plots.filter((plot) => plot.svg.clientWidth), now = shown.findIndex((plot) => plot.svg === document.activeElement);
    const to = shown[now < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, now + by))];
    if (to) { to.svg.focus(); to.figure.scrollIntoView({ block: "nearest" }); }
  }
  const keys = { "?": "help", j: "next", k: "previous", l: "logarithmic", s: "smooth", x: "axis" };
  document.addEventListener("keydown", (event) => {
    if (event.target.id === "key-text" || event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const run = [...runs.keys()][Number(event.key) - 1];
    if (/^[1-9]$/.test(event.key) && run) { event.preventDefault(); show(run); }
    else if (keys[event.key]) { event.preventDefault(); acts[keys[event.key]](); }
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (button) acts[button.dataset.act]();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
  function moved() { plots.forEach((plot) => { plot.step = null; }); draw(); }
  at("smooth").addEventListener("change", draw);
  at("axis").addEventListener("change", moved);
  at("more").addEventListener("toggle", () => plots.forEach(paint));
  new ResizeObserver(() => plots.forEach(paint)).observe(at("plots"));
  server.asks(turn);
  turn();
})();
