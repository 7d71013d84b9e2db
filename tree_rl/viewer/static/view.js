"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById(name);
  const canvas = byId("tree"), lower = byId("rows");
  const paint = canvas.getContext("2d"), paintRows = lower.getContext("2d");
  const number = (value) => value.toLocaleString("en-US");
  const short = (value) => (Number.isInteger(value) ? number(value) : value.toPrecision(3));
  // What a file says may hide or turn text: show signs that have no picture by their number.
  const visible = (text) =>
    text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
      (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
  const CAUSES = { "sampling": "#e8590c", "observation": "#1c7ed6", "context edit": "#ae3ec9", "prefix end": "#868e96", "unknown": "#868e96" };
  const GIVEN = "#8fa3b5", SAMPLED = "#2f9e44", NONE = "#adb5bd";
  const PARTS = ["#1c7ed6", "#e8590c", "#2f9e44", "#ae3ec9", "#f08c00", "#0ca678", "#d6336c", "#4263eb"];
  const TOP = 22, ROWS_HEIGHT = 120;

  let group, layout, transform = d3.zoomIdentity, selected = -1, found = [], folded = new Set(), scroll = 0;

  /** Lines of the segments: the first child continues its parent's line, each other child takes the next free one. */
  function lay(segments) {
    const count = segments.parent.length, line = new Int32Array(count).fill(-1), first = new Int32Array(count).fill(-1);
    const children = Array.from({ length: count }, () => []);
    let lines = 0, longest = 1;
    for (let one = 0; one < count; one++) {
      const parent = segments.parent[one];
      if (parent >= 0) children[parent].push(one);
      if (parent >= 0 && (line[parent] < 0 || folded.has(parent))) continue;
      if (parent >= 0 && first[parent] < 0) { first[parent] = one; line[one] = line[parent]; } else line[one] = lines++;
      longest = Math.max(longest, segments.depth[one] + segments.length[one]);
    }
    return { line, lines, longest, children };
  }

  /** Rows through each segment, by their numbers, and the mean of each figure over them. */
  function meet(group) {
    const { parent } = group.segments, through = parent.map(() => []);
    group.rows.leaf.forEach((leaf, row) => { for (let one = leaf; one >= 0; one = parent[one]) through[one].push(row); });
    const means = {};
    for (const [name, values] of Object.entries(group.rows.figures)) {
      means[name] = through.map((rows) => {
        const known = rows.map((row) => values[row]).filter((value) => value !== null);
        return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
      });
    }
    return { through, means };
  }

  const dark = () => document.documentElement.dataset.theme === "dark";
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const mix = (from, to, share) => `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * share)).join(",")})`;
  const few = () => (dark() ? [52, 84, 120] : [190, 215, 238]), many = () => (dark() ? [165, 216, 255] : [8, 48, 107]);
  const LOW = [201, 42, 42], MIDDLE = [173, 181, 189], HIGH = [43, 138, 62];

  /** Colours of a choice: of a segment, and the legend. */
  function colours(name) {
    const { segments, rows } = group;
    if (name === "role") return { of: null, legend: [[GIVEN, "given: prompts, tool results"], [SAMPLED, "sampled by the model"]] };
    if (name === "cause") {
      const seen = Object.keys(CAUSES).filter((cause) => segments.cause.includes(cause));
      return { of: (one) => CAUSES[segments.cause[one]] || NONE,
        legend: [...seen.map((cause) => [CAUSES[cause], "branches by " + cause]), [NONE, "continues the heaviest path"]] };
    }
    if (name === "partition") {
      const parts = new Set(segments.partition).size;
      return { of: (one) => PARTS[segments.partition[one] % PARTS.length], legend: [[PARTS[0], `${parts} partitions, neighbours in turn`]] };
    }
    if (name === "paths") {
      const most = Math.log(Math.max(2, rows.leaf.length));
      const of = (one) => mix(few(), many(), Math.log(segments.paths[one]) / most);
      return { of, legend: [[mix(few(), many(), 0), "1 row"], [mix(few(), many(), 1), `${number(rows.leaf.length)} rows through a segment`]] };
    }
    const values = rows.figures[name].filter((value) => value !== null);
    const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const signed = low < 0 && high > 0, reach = Math.max(-low, high);
    const of = (one) => {
      const mean = group.means[name][one];
      if (mean === null) return NONE;
      if (!signed) return mix(LOW, HIGH, (mean - low) / span);
      return mean < 0 ? mix(MIDDLE, LOW, -mean / reach) : mix(MIDDLE, HIGH, mean / reach);
    };
    const ends = signed ? [-reach, 0, reach] : low === high ? [low] : [low, high];
    const shade = (value) => (signed ? (value < 0 ? mix(MIDDLE, LOW, 1) : value ? mix(MIDDLE, HIGH, 1) : mix(MIDDLE, LOW, 0)) : mix(LOW, HIGH, (value - low) / span));
    return { of, legend: ends.map((value) => [shade(value), `${name.replaceAll("_", " ")} ${short(value)}`]) };
  }

  function size(element, context, height) {
    const width = element.clientWidth, ratio = window.devicePixelRatio || 1;
    if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
      element.style.height = height + "px";
      element.width = Math.round(width * ratio);
      element.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return width;
  }

  const scale = (width) => transform.rescaleX(d3.scaleLinear([0, layout.longest], [10, width - 10]));
  const lane = () => Math.max(5, Math.min(20, (viewHeight() - TOP - 8) / layout.lines));
  const viewHeight = () => Math.max(150, Math.min(window.innerHeight * 0.56, TOP + 12 + layout.lines * 20));
  const mostScroll = () => Math.max(0, TOP + 12 + layout.lines * lane() - viewHeight());

  function axis(context, x, width, height) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of x.ticks(Math.max(2, width / 110))) {
      context.strokeStyle = css("--line");
      context.beginPath(); context.moveTo(x(tick), 0); context.lineTo(x(tick), height); context.stroke();
      context.fillStyle = css("--pale");
      context.fillText(number(tick), Math.max(22, Math.min(width - 22, x(tick))), 4);
    }
  }

  function draw() {
    const height = viewHeight(), width = size(canvas, paint, height), x = scale(width), { segments } = group;
    const chosen = colours(byId("colour").value), tall = lane(), bar = Math.max(3, tall * 0.68);
    scroll = Math.max(0, Math.min(mostScroll(), scroll));
    axis(paint, x, width, height);
    const marked = new Set(found), onPath = new Set();
    for (let one = selected; one >= 0; one = segments.parent[one]) onPath.add(one);
    paint.save();
    paint.beginPath(); paint.rect(0, TOP - 2, width, height); paint.clip();
    paint.textAlign = "left"; paint.textBaseline = "middle";
    for (let one = 0; one < segments.parent.length; one++) {
      if (layout.line[one] < 0) continue;
      const y = TOP + layout.line[one] * tall - scroll, from = x(segments.depth[one]);
      const to = x(segments.depth[one] + segments.length[one]), parent = segments.parent[one];
      if (parent >= 0 && layout.line[parent] !== layout.line[one] && from > -5 && from < width + 5) {
        paint.strokeStyle = onPath.has(one) ? css("--mark") : css("--pale");
        paint.beginPath(); paint.moveTo(from, TOP + layout.line[parent] * tall - scroll + bar); paint.lineTo(from, y + bar / 2); paint.stroke();
      }
      if (to < 0 || from > width || y > height || y + tall < TOP) continue;
      const wide = Math.max(1, to - from - (to - from > 3 ? 1 : 0));
      if (chosen.of) { paint.fillStyle = chosen.of(one); paint.fillRect(from, y, wide, bar); } else {
        let at = segments.depth[one];
        segments.roles[one].forEach((run, turn) => {
          paint.fillStyle = turn % 2 ? SAMPLED : GIVEN;
          const begin = x(at), end = Math.min(from + wide, x(at += run));
          if (run) paint.fillRect(begin, y, Math.max(0.5, end - begin), bar);
        });
      }
      if (bar > 10 && wide > 70) {
        paint.save();
        paint.beginPath(); paint.rect(from, y, wide - 3, bar); paint.clip();
        paint.font = "10px system-ui, sans-serif"; paint.lineWidth = 3;
        const caption = `${number(segments.length[one])}${segments.paths[one] > 1 ? " \u00d7" + number(segments.paths[one]) : ""}`;
        paint.strokeStyle = "rgba(0,0,0,.45)"; paint.strokeText(caption, Math.max(from, 0) + 5, y + bar / 2 + 0.5);
        paint.fillStyle = "#fff"; paint.fillText(caption, Math.max(from, 0) + 5, y + bar / 2 + 0.5);
        paint.restore();
      }
      if (folded.has(one)) { paint.fillStyle = css("--mark"); paint.fillRect(to - 4, y - 1, 3, bar + 2); }
      if (marked.has(one) || onPath.has(one)) {
        paint.strokeStyle = css("--mark"); paint.lineWidth = one === selected ? 2.5 : 1;
        paint.strokeRect(from + 0.5, y - 0.5, wide, bar + 1); paint.lineWidth = 1;
      }
    }
    paint.restore();
    drawRows(x);
  }

  const rowsColour = () => (dark() ? "#364b61" : "#c5d7ea"), tokensColour = () => (dark() ? "#74c0fc" : "#1864ab");

  /** Rows that reach each position, and distinct tokens there. */
  function drawRows(x) {
    const width = size(lower, paintRows, ROWS_HEIGHT), most = group.rows.tokens.length, floor = ROWS_HEIGHT - 6;
    axis(paintRows, x, width, ROWS_HEIGHT);
    const y = (count) => floor - (count / most) * (floor - 24);
    const steps = (changes, colour) => {
      const at = [...changes.keys()].sort((a, b) => a - b);
      let count = 0;
      paintRows.beginPath(); paintRows.moveTo(x(0), floor);
      for (const place of at) { paintRows.lineTo(x(place), y(count)); count += changes.get(place); paintRows.lineTo(x(place), y(count)); }
      paintRows.lineTo(x(layout.longest), y(count)); paintRows.lineTo(x(layout.longest), floor); paintRows.closePath();
      paintRows.fillStyle = colour; paintRows.fill();
    };
    const add = (changes, place, by) => changes.set(place, (changes.get(place) || 0) + by);
    const rows = new Map(), tokens = new Map();
    group.rows.tokens.forEach((length) => { add(rows, 0, 1); add(rows, length, -1); });
    group.segments.depth.forEach((depth, one) => { add(tokens, depth, 1); add(tokens, depth + group.segments.length[one], -1); });
    steps(rows, rowsColour());
    steps(tokens, tokensColour());
  }

  let frame = 0;
  const redraw = () => { if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); }); };

  function fillLegend(list, entries) {
    list.replaceChildren(...entries.map(([colour, text]) => {
      const item = document.createElement("li"), swatch = document.createElement("i");
      swatch.style.background = colour;
      item.append(swatch, text);
      return item;
    }));
  }

  function legend() {
    fillLegend(byId("legend"), colours(byId("colour").value).legend);
    const most = number(group.rows.tokens.length);
    fillLegend(byId("rows-legend"), [[rowsColour(), `rows that reach the position, of ${most}`], [tokensColour(), "distinct tokens there"]]);
  }

  const element = (name, text, ...inside) => { const made = document.createElement(name); if (text !== null) made.textContent = text; made.append(...inside); return made; };

  function show() {
    const panel = byId("details"), { segments, rows } = group;
    if (selected < 0) {
      const causes = Object.entries(group.causes).map(([cause, count]) => element("tr", null, element("td", cause), element("td", number(count))));
      panel.replaceChildren(element("h2", "Branches because of"), element("table", null, ...causes),
        element("p", "Choose a segment: click it, or focus the tree and press an arrow key."));
      return;
    }
    const one = selected, from = segments.depth[one], sampled = segments.roles ? segments.roles[one].reduce((sum, run, turn) => sum + (turn % 2 ? run : 0), 0) : null;
    const facts = [`tokens ${number(from)} to ${number(from + segments.length[one])}`, `${number(segments.paths[one])} of ${number(rows.leaf.length)} rows`];
    if (sampled !== null) facts.push(`${number(sampled)} of ${number(segments.length[one])} tokens sampled`);
    if (segments.cause[one]) facts.push(`branches by ${segments.cause[one]}`);
    if (segments.partition) facts.push(`partition ${segments.partition[one]}`);
    if (layout.children[one].length) facts.push(`${layout.children[one].length} children`);
    const names = Object.keys(rows.figures), through = group.through[one];
    const head = element("tr", null, element("th", "row"), element("th", "tokens"), ...names.map((name) => element("th", name.replaceAll("_", " "))));
    const lines = through.slice(0, 200).map((row) => element("tr", null, element("td", visible(rows.name[row])), element("td", number(rows.tokens[row])),
      ...names.map((name) => element("td", rows.figures[name][row] === null ? "" : short(rows.figures[name][row])))));
    const text = segments.text[one], cut = 20000;
    panel.replaceChildren(element("h2", `Segment ${number(one)}`), element("p", facts.join("; ")),
      element("pre", visible(text.slice(0, cut)) + (text.length > cut ? ` \u2026 (${number(text.length - cut)} more characters)` : "")),
      element("table", null, head, ...lines));
    if (through.length > 200) panel.append(element("p", `and ${number(through.length - 200)} more rows`));
  }

  /** Bring a segment into view. */
  function reveal(one) {
    for (let up = group.segments.parent[one]; up >= 0; up = group.segments.parent[up]) folded.delete(up);
    layout = lay(group.segments);
    const width = canvas.clientWidth, x = scale(width), from = x(group.segments.depth[one]), y = layout.line[one] * lane();
    if (from < 0 || from > width - 40) moveTo(transform.translate((width / 3 - from) / transform.k, 0));
    if (y < scroll) scroll = y; else if (y > scroll + viewHeight() - TOP - 30) scroll = y - viewHeight() / 2;
  }

  function select(one) {
    selected = one;
    if (one >= 0) reveal(one);
    show(); redraw(); remember();
  }

  function toggle(one) {
    if (one < 0 || !layout.children[one].length) return;
    if (!folded.delete(one)) folded.add(one);
    layout = lay(group.segments);
    redraw();
  }

  const zoom = d3.zoom().scaleExtent([1, 5000]).on("zoom", (event) => {
    if (event.sourceEvent && event.sourceEvent.type.match(/mouse|touch|pointer/)) scroll -= event.transform.y - transform.y;
    transform = event.transform; redraw();
  });
  const moveTo = (next) => d3.select(canvas).call(zoom.transform, next);
  const fit = () => { scroll = 0; moveTo(d3.zoomIdentity); };

  function at(event) {
    const box = canvas.getBoundingClientRect(), x = scale(canvas.clientWidth), tall = lane();
    const place = x.invert(event.clientX - box.left), line = Math.floor((event.clientY - box.top - TOP + scroll) / tall), { segments } = group;
    return segments.parent.findIndex((_, one) => layout.line[one] === line && segments.depth[one] <= place && place < segments.depth[one] + segments.length[one]);
  }

  function search(next) {
    const wanted = byId("search").value.toLowerCase();
    found = wanted ? group.segments.text.flatMap((text, one) => (text.toLowerCase().includes(wanted) ? [one] : [])) : [];
    document.body.dataset.found = found.length;
    if (next && found.length) select(found.find((one) => one > selected) ?? found[0]);
    redraw();
  }

  function remember() {
    const state = new URLSearchParams({ group: data.groups.indexOf(group), colour: byId("colour").value });
    if (selected >= 0) state.set("segment", selected);
    try { history.replaceState(null, "", "#" + state); } catch { /* a page from a file may not */ }
    Object.assign(document.body.dataset, { group: data.groups.indexOf(group), segment: selected, segments: group.segments.parent.length, lines: layout.lines });
  }

  function open(index) {
    group = data.groups[index];
    if (!group.through) Object.assign(group, meet(group));
    folded = new Set(); selected = -1; found = []; scroll = 0;
    layout = lay(group.segments);
    const before = byId("colour").value, choices = [["paths", "rows through it"]];
    if (group.segments.roles) choices.push(["role", "role"]);
    choices.push(["cause", "cause of branching"]);
    for (const name of Object.keys(data.figures)) if (group.rows.figures[name]) choices.push([name, data.figures[name]]);
    if (group.segments.partition) choices.push(["partition", "partition"]);
    const missing = Object.keys(data.figures).filter((name) => !group.rows.figures[name]).map((name) => name.replaceAll("_", " "));
    if (!group.segments.partition) missing.push("partition (--max-tokens)");
    const more = missing.map((name) => { const option = new Option("not in this file: " + name, ""); option.disabled = true; return option; });
    byId("colour").replaceChildren(...choices.map(([value, text]) => new Option(text, value)), ...more);
    if (choices.some(([value]) => value === before)) byId("colour").value = before;
    byId("summary").textContent = `${number(group.rows.leaf.length)} rows, ${number(group.unique)} unique of ${number(group.flat)} flat tokens, ` +
      `POR ${group.por.toFixed(3)} (share of the rows' tokens that repeat a prefix), at most ${(group.flat / group.unique).toFixed(2)} times as fast by tokens`;
    legend(); show(); fit(); remember();
  }

  function press(event) {
    const { segments } = group, { children } = layout, keys = {
      ArrowRight: () => select(selected < 0 ? 0 : children[selected][0] ?? selected),
      ArrowLeft: () => select(selected < 0 ? 0 : Math.max(segments.parent[selected], 0)),
      ArrowDown: () => step(1), ArrowUp: () => step(-1),
      "c": () => toggle(selected), "Enter": () => toggle(selected),
      "+": () => d3.select(canvas).call(zoom.scaleBy, 1.5), "=": () => d3.select(canvas).call(zoom.scaleBy, 1.5),
      "-": () => d3.select(canvas).call(zoom.scaleBy, 1 / 1.5), "0": fit, "Escape": () => select(-1),
    };
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); return; }
    if (keys[event.key] && document.activeElement === canvas) { event.preventDefault(); keys[event.key](); }
  }

  /** The next segment of the same depth in the tree: a sibling, or the nearest line's. */
  function step(by) {
    if (selected < 0) return select(0);
    const { parent, depth, length } = group.segments, line = layout.line[selected] + by, place = depth[selected];
    let best = -1;
    parent.forEach((_, one) => {
      if (layout.line[one] !== line) return;
      const away = (other) => Math.max(depth[other] - place, place - depth[other] - length[other] + 1, 0);
      if (best < 0 || away(one) < away(best)) best = one;
    });
    if (best >= 0) select(best);
  }

  function theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
    if (group) { legend(); redraw(); }
  }

  document.title = visible(data.title) + " \u2013 tree_rl";
  byId("title").textContent = visible(data.title);
  byId("group").replaceChildren(...data.groups.map((one, index) => new Option(`${visible(one.name).slice(0, 40)} (POR ${one.por.toFixed(2)}, ${number(one.rows.leaf.length)} rows)`, index)));
  byId("group").addEventListener("change", (event) => open(Number(event.target.value)));
  byId("colour").addEventListener("change", () => { legend(); redraw(); remember(); });
  byId("search").addEventListener("input", () => search(false));
  byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") search(true); if (event.key === "Escape") { event.target.value = ""; search(false); canvas.focus(); } });
  byId("fit").addEventListener("click", fit);
  byId("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
  document.addEventListener("keydown", press);
  canvas.addEventListener("click", (event) => select(at(event)));
  canvas.addEventListener("dblclick", (event) => toggle(at(event)));
  canvas.addEventListener("wheel", (event) => { if (event.shiftKey) { event.preventDefault(); scroll += event.deltaY; redraw(); } }, { passive: false });
  window.addEventListener("resize", redraw);
  d3.select(canvas).call(zoom).on("dblclick.zoom", null);
  const asked = new URLSearchParams(location.hash.slice(1));
  theme(asked.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const index = Number(asked.get("group")) || 0;
  byId("group").value = index < data.groups.length ? index : 0;
  open(Number(byId("group").value));
  if (asked.get("colour") && [...byId("colour").options].some((option) => option.value === asked.get("colour"))) { byId("colour").value = asked.get("colour"); legend(); redraw(); }
  if (asked.get("segment") !== null && Number(asked.get("segment")) < group.segments.parent.length) select(Number(asked.get("segment")));
  window.linesNow = () => layout.lines;
  // For measurements: milliseconds of each of so many frames while zooming.
  window.frameTimes = (count) => Array.from({ length: count }, (_, turn) => {
    transform = d3.zoomIdentity.scale(1 + turn); const begun = performance.now(); draw(); return performance.now() - begun;
  });
})();
