"use strict";
// The charts that follow the slider; page.js, which follows, uses what this returns
const explorer = (() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const at = (id) => document.getElementById(id);
  const say = (id, text) => { at(id).textContent = text; };
  const charts = content.charts;
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [["toImage"]] };
  const bars = ["kept-heads", "kept-neurons"].filter((id) => charts[id]);
  const followers = [...bars, "mask", "scores", "curve", "parameters"].filter((id) => charts[id]);
  const MEGABYTE = 1048576, FEWEST_POINTS = 3, heard = new Set();
  let walk = null, step = 0, cell = null, timer = null, measure = content.measures[0];

  // Colours of the page in the charts

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  function themed(chart) {
    const [ink, soft, grid, card] = ["ink", "soft", "grid", "card"].map(colour);
    const font = getComputedStyle(document.body).fontFamily;
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { color: soft }, automargin: true };
    Object.assign(chart.layout, {
      font: { color: ink, family: font, size: 13 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...chart.layout.xaxis, ...axis }, yaxis: { ...chart.layout.yaxis, ...axis },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      hoverlabel: { bgcolor: card, bordercolor: soft, font: { color: ink, family: font } },
    });
    for (const trace of chart.data) {
      if (trace.line?.color === "#000000" || trace.inked) { trace.line.color = ink; trace.inked = true; }
      if (trace.type === "heatmap" && !trace.colorbar) trace.colorscale = [[0, colour("removed")], [1, colour("kept")]];
      if (trace.meta === "kept" || trace.meta === "removed") trace.marker.color = colour(trace.meta);
      if (trace.meta === "kept") trace.textfont.color = colour("on-kept");
      if (trace.colorbar) trace.colorbar.tickfont = { color: soft };
    }
    return chart;
  }
  // The charts below the first screen are drawn one by one, so that the page stays responsive
  function drawInTurn(ids) {
    if (!ids.length) return void (document.body.dataset.drawn = "yes");
    draw(ids[0]);
    setTimeout(drawInTurn, 0, ids.slice(1));
  }
  function draw(id) {
    if (at(id).closest("[hidden], details:not([open])")) return undefined;
    at(id).style.height = `${charts[id].layout.height}px`; // the page keeps its shape while a chart is being drawn
    const drawn = Plotly.react(at(id), charts[id].data, charts[id].layout, config);
    if (!heard.has(id)) listen(id);
    return drawn;
  }
  function listen(id) {
    heard.add(id);
    if (["mask", "scores"].includes(id)) {
      at(id).on("plotly_hover", ({ points: [point] }) => say("cell", point.text));
      at(id).on("plotly_click", ({ points: [{ pointNumber: [row, index] }] }) => toHead(walk.starts[row] + index));
    }
    if (["curve", "parameters"].includes(id)) {
      at(id).on("plotly_click", ({ points: [point] }) => go([null, point.pointNumber, walk.knee, walk.solution][point.curveNumber]));
    }
  }
  for (const folded of document.querySelectorAll("details")) {
    folded.addEventListener("toggle", () => folded.querySelectorAll(".plot").forEach((plot) => draw(plot.id)));
  }
  function paint() {
    Object.values(charts).forEach(themed);
    Object.keys(charts).forEach(draw);
  }

  // One run

  function unpacked(packed) {
    const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  }
  function open(index) {
    const data = content.walks[index];
    const heads = Math.max(0, ...data.rows.map((row) => row.units));
    const starts = data.rows.reduce((list, row) => [...list, list.at(-1) + row.units], [0]);
    const went = new Map(data.removed.flatMap((gone, number) => gone.map((head) => [head, number])));
    const gone = data.removed.map(((sum) => (each) => (sum += each.length))(0));
    const edges = data.rows.reduce((list, row) => [...list, list.at(-1) + row.applications], [0]);
    const scores = data.scores && { ...data.scores, values: unpacked(data.scores.values) };
    const across = data.kept ? data.kept.work : gone; // of the curve
    walk = { ...data, index, heads, starts, went, gone, edges, scores, across, last: data.removed.length - 1, before: new Set(data.gone) };
    cell = null;
    at("step").max = walk.last;
    at("marks").replaceChildren(...[walk.knee, walk.solution].filter((mark) => mark !== null).map((mark) => new Option(mark, mark)));
    at("to-knee").hidden = walk.knee === null;
    for (const id of ["cells", "cell", "scores-details"]) if (at(id)) at(id).hidden = !data.rows.length;
    const few = walk.last + 1 < FEWEST_POINTS; // a line through two points is no chart
    for (const id of ["curve-figure", "parameters-figure"]) at(id).hidden = few;
    at("few-points").hidden = !few;
    for (const id of bars) at(id).closest("figure").hidden = !kind(id);
    at("to-solution").disabled = walk.solution === null;
    if (at("walk")) at("walk").value = index;
    if (at("tied")) say("tied", data.rows.some((row) => row.applications > 1)
      ? "A block over several layers is one head that they share (tied weights): it is removed from all of them at once." : "");
    shape();
    lines();
  }
  const kind = (id) => walk.kept.kinds.find(({ words }) => id === `kept-${words}`);
  // Heads are numbered through all rows, which may have different numbers of them
  const rowOf = (head) => walk.starts.findIndex((start) => start > head) - 1;
  const indexOf = (head) => head - walk.starts[rowOf(head)];
  const middle = (row) => (walk.edges[row] + walk.edges[row + 1]) / 2;
  function shape() {
    const layers = walk.edges.at(-1);
    const height = Math.round(Math.min(40, Math.max(14, 400 / layers)) * layers) + 62;
    const every = (count) => Array.from({ length: count }, (_, number) => number);
    const stride = (count) => Math.ceil(count / 24);
    const tied = walk.rows.some((row) => row.applications > 1);
    const names = walk.rows.map((row) => (tied ? `${row.name} (×${row.applications})` : row.name));
    for (const id of ["mask", "scores"].filter((each) => charts[each])) {
      const { data, layout } = charts[id];
      Object.assign(data[0], { x: every(walk.heads), y: walk.edges });
      layout.height = height;
      charts.curve.layout.height = Math.max(height, 360); // they stand side by side
      layout.margin = { l: 56, r: 10, t: 8, b: 46 };
      Object.assign(layout.xaxis, {
        tickvals: every(walk.heads).filter((head) => head % stride(walk.heads) === 0), range: [-0.5, walk.heads - 0.5],
        showgrid: false, zeroline: false, ticks: "", title: { text: "Head" },
      });
      Object.assign(layout.yaxis, {
        tickvals: names.map((_, row) => middle(row)), ticktext: names, range: [layers, 0], autorange: false,
        showgrid: false, zeroline: false, ticks: "", title: { text: tied ? "Layer (× times it is applied)" : "Layer" },
      });
    }
  }
  const quality = () => walk.qualities[measure.name];
  function lines() {
    for (const [id, across] of [["curve", walk.across], ["parameters", walk.parameters]]) {
      const traces = charts[id].data, unit = id === "curve" && walk.kept ? " %" : "";
      charts[id].layout.yaxis.title = { text: measure.title };
      Object.assign(traces[1], { inked: false }).line.color = walk.colour;
      const point = (trace, number) => {
        trace.x = number === null ? [] : [across[number]];
        trace.y = number === null ? [] : [quality()[number]];
        trace.hovertemplate = `${trace.name}: %{y:.4f} at %{x:,}${unit}<extra></extra>`;
        trace.visible = number !== null;
      };
      Object.assign(traces[0], { x: [across[0], across[walk.last]], y: [quality()[0], quality()[0]] });
      Object.assign(traces[1], { x: across, y: quality(), hovertemplate: `%{y:.4f} at %{x:,}${unit}<extra></extra>` });
      point(traces[2], walk.knee);
      point(traces[3], walk.solution);
      themed(charts[id]);
    }
  }

  // One step

  function score(head, number) {
    if (!walk.scores || walk.before.has(head) || (walk.went.get(head) ?? Infinity) < number) return null;
    return walk.scores.values[walk.scores.places[Math.max(number, Math.min(1, walk.last))] * walk.starts.at(-1) + head];
  }
  function written(value) {
    if (!walk.scores.logs) return Number(value.toPrecision(4)).toString();
    return Math.abs(value) < 300 ? (10 ** value).toPrecision(4) : `10^${value.toFixed(1)}`;
  }
  function story(head) {
    const layers = walk.rows[rowOf(head)].applications;
    const went = walk.went.get(head), value = score(head, step);
    const parts = [`${walk.names[head]}${layers > 1 ? `, shared by ${layers} layers` : ""}`];
    if (value !== null && !Number.isNaN(value)) parts.push(`score ${written(value)}`);
    if (walk.before.has(head)) parts.push("removed before this run");
    else if (went === undefined) parts.push("never removed");
    else parts.push(went <= step ? `removed at step ${went}` : `will be removed at step ${went}`);
    return parts.join(" · ");
  }
  const matrix = (value) => walk.rows.map((row, place) =>
    Array.from({ length: walk.heads }, (_, index) => (index < row.units ? value(walk.starts[place] + index) : null)));
  const places = (heads) => ({ x: heads.map(indexOf), y: heads.map((head) => middle(rowOf(head))) });

  function show(number) {
    fill(number);
    followers.forEach(draw);
    tell();
  }
  function fill(number) {
    step = Math.min(Math.max(number, 0), walk.last);
    if (charts.mask) fillCells(matrix(story));
    fillBars();
    for (const [id, across] of [["curve", walk.across], ["parameters", walk.parameters]]) {
      Object.assign(charts[id].data[4], { x: [across[step]], y: [quality()[step]], hoverinfo: "skip" });
    }
  }
  function fillCells(text) {
    const removed = walk.removed[step];
    const isGone = (head) => walk.before.has(head) || (walk.went.get(head) ?? Infinity) <= step;
    Object.assign(charts.mask.data[0], { z: matrix((head) => (isGone(head) ? 0 : 1)), text });
    Object.assign(charts.mask.data[1], places(removed));
    Object.assign(charts.mask.data[2], places(cell === null ? [] : [cell]));
    Object.assign(charts.scores.data[0], { z: [], text }, walk.scores && coloured(at("scale").value));
    Object.assign(charts.scores.data[1], places(walk.scores ? removed : []));
  }
  // The scores of this step as colours: by rank, or by value on the scale of the step or of the run
  function coloured(scale) {
    const heads = Array.from({ length: walk.starts.at(-1) }, (_, head) => head).filter((head) => isScore(score(head, step)));
    if (scale === "rank") {
      const order = heads.toSorted((a, b) => (score(a, step) < score(b, step) ? -1 : score(a, step) > score(b, step) ? 1 : 0));
      const ranks = new Map(order.map((head, place) => [head, place + 1]));
      return { z: matrix((head) => ranks.get(head) ?? null), zmin: 1, zmax: Math.max(2, heads.length) };
    }
    const values = heads.map((head) => score(head, step)).filter(Number.isFinite);
    const [low, high] = scale === "run" || !values.length ? walk.scores.range : [Math.min(...values), Math.max(...values)];
    const z = matrix((head) => { const value = score(head, step); return Number.isFinite(value) ? value : null; });
    return { z, zmin: low, zmax: high > low ? high : low + 1 };
  }
  const isScore = (value) => value !== null && !Number.isNaN(value);
  // The units that each layer has left, of runs towards a budget
  function fillBars() {
    for (const id of bars.filter(kind)) {
      const { words, layers, totals, left } = kind(id), { data, layout } = charts[id], now = left[step];
      const texts = layers.map((layer, place) => `Layer ${layer}: ${count(now[place])} of ${count(totals[place])} ${words} left`);
      Object.assign(data[0], { x: now, y: layers, text: now.map(count), hovertext: texts });
      Object.assign(data[1], { x: totals.map((total, place) => total - now[place]), y: layers, hovertext: texts });
      layout.height = Math.round(Math.min(34, Math.max(16, 400 / layers.length)) * layers.length) + 62;
      Object.assign(layout.xaxis, { range: [0, Math.max(...totals)], showgrid: false, zeroline: false });
      Object.assign(layout.yaxis, { showgrid: false, dtick: Math.ceil(layers.length / 24) });
    }
  }
  const count = (number) => number.toLocaleString("en");
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  function tellUnits() {
    if (!walk.kept) return say("now-heads", walk.gone[step]);
    for (const id of bars) {
      const units = kind(id);
      say(`now-${id.slice("kept-".length)}`, units ? `${count(sum(units.totals) - sum(units.left[step]))} of ${count(sum(units.totals))}` : "-");
    }
    say("now-work", `${walk.across[step].toFixed(1)} %`);
  }
  function tellQuality() {
    const change = quality()[step] - quality()[0], text = change.toFixed(4);
    say("now-quality", quality()[step].toFixed(4));
    say("now-change", step ? `(${change < 0 ? "" : "+"}${text})` : "");
    at("now-change").className = Number(text) && change > 0 !== measure.higher ? "loss" : "";
  }
  function tellSpeed() {
    const [times, measured] = walk.speeds[step] ?? [null, false];
    say("now-speed-name", times === null || !step ? "Speed" : measured ? "Speed (measured)" : "Speed (estimated)");
    say("now-speed", times === null ? "not measured" : `${times.toFixed(2)} times`);
  }
  function tell() {
    const removed = walk.removed[step];
    const marks = [step === walk.knee && "the knee", step === walk.solution && "the solution"].filter(Boolean);
    at("step").value = step;
    at("step").setAttribute("aria-valuetext", `step ${step} of ${walk.last}, ${walk.kept ? `${walk.across[step].toFixed(1)} % left` : `${walk.gone[step]} heads gone`}`);
    say("now-number", `${step} of ${walk.last}`);
    say("now-marks", marks.length ? ` (${marks.join(", ")})` : "");
    tellUnits();
    tellQuality();
    tellSpeed();
    say("now-parameters", walk.parameters[step].toLocaleString("en"));
    say("now-size-name", `MB (${walk.precision})`);
    say("now-size", (walk.bytes[step] / MEGABYTE).toFixed(2));
    say("now-removed", (walk.kept ? walk.kept.counted[step] : removed.map((head) => walk.names[head]).join(", ")) || "nothing");
    say("take-step", step);
    say("take", `gnorm prune --from-run ${walk.folder} --at-step ${step} --out ${walk.out}${step}`);
    if (charts.scores) say("scores-caption", captionOfScores());
    if (cell !== null) say("cell", story(cell));
    history.replaceState(null, "", `#step=${step}${content.walks.length > 1 ? `&run=${walk.index}` : ""}`);
    document.body.dataset.step = step;
  }

  function captionOfScores() {
    if (!walk.scored) return "This run has no scores yet.";
    if (!walk.scores) return "The scores of this run would make the page too large; they are in its journal.";
    const scale = at("scale").value === "rank" ? ", by rank: 1 is the lowest" : walk.scores.logs ? ", as powers of ten" : "";
    return `${step ? "The scores by which this step was chosen" : "The scores of the unpruned model"}${scale}.`;
  }

  // Slider, buttons, keys

  function pause() {
    clearInterval(timer);
    timer = null;
    say("play", "Play");
    at("play").setAttribute("aria-pressed", "false");
  }
  function play() {
    if (timer !== null) return pause();
    if (step === walk.last) show(0);
    say("play", "Pause");
    at("play").setAttribute("aria-pressed", "true");
    timer = setInterval(() => (step < walk.last ? show(step + 1) : pause()), Math.min(600, Math.max(80, 12000 / walk.last)));
  }
  const go = (number) => { pause(); show(number); };
  at("play").onclick = play;
  at("back").onclick = () => go(step - 1);
  at("on").onclick = () => go(step + 1);
  at("to-knee").onclick = () => go(walk.knee);
  at("to-solution").onclick = () => go(walk.solution);
  function toHead(head) {
    cell = head;
    go(walk.went.get(head) ?? step);
  }
  at("measure").onchange = () => {
    measure = content.measures.find(({ name }) => name === at("measure").value);
    say("now-measure", measure.plain);
    lines();
    show(step);
  };
  if (at("scale")) at("scale").onchange = () => show(step);
  at("step").oninput = () => go(Number(at("step").value));
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (charts.mask) at("mask").onkeydown = (event) => {
    if (event.key === "Enter" && cell !== null) return toHead(cell);
    const move = moves[event.key];
    if (!move) return undefined;
    event.preventDefault();
    const [down, across] = cell === null ? [0, 0] : [rowOf(cell) + move[0], indexOf(cell) + move[1]];
    const row = Math.min(Math.max(down, 0), walk.rows.length - 1);
    cell = walk.starts[row] + Math.min(Math.max(across, 0), walk.rows[row].units - 1);
    return show(step);
  };
  document.addEventListener("keydown", (event) => {
    const target = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: walk.last }[event.key];
    const taken = event.target.closest("input, select, #mask, .scroll, code");
    if (target === undefined || taken || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(target);
  });
  if (at("walk")) at("walk").onchange = () => { pause(); open(Number(at("walk").value)); show(walk.solution ?? walk.last); };


  // Start

  const asked = new URLSearchParams(location.hash.slice(1));
  const first = Number(asked.get("run") ?? content.first);
  open(content.walks[first] ? first : content.first);
  fill(asked.has("step") ? Number(asked.get("step")) || 0 : walk.solution ?? walk.last);
  Object.values(charts).forEach(themed);
  followers.forEach(draw);
  tell();
  document.body.dataset.ready = performance.now();
  setTimeout(drawInTurn, 0, Object.keys(charts).filter((id) => !followers.includes(id)));
  return { at, say, charts, draw, paint, go, walk: () => walk };
})();
