/* State of the page and what keys, pointer and menus do to it. The window is a base, moved and scaled by d3-zoom. */

const byId = (id) => document.getElementById(id);

/* A turn's header, which its colour tells already. */
const HEADER = /<\|im_start\|>\w+\s|<\|[a-z_]+\|>|<\/?tool_response>\s*/g;

/* Pixels of a token or a lane, whichever grows later, at the closest zoom. */
const CLOSEST = 40;

class Viewer {
  constructor(data) {
    this.data = data;
    this.tree = byId("tree");
    this.state = { measure: "role", selected: -1, row: -1, matches: new Set(), wholePath: false };
    this.transform = d3.zoomIdentity;
    this.zoom = d3.zoom().filter((event) => this.mayZoom(event));
    this.zoom.on("zoom", ({ transform }) => ((this.transform = transform), this.draw()));
    d3.select(this.tree).call(this.zoom).on("dblclick.zoom", null);
    byId("source").textContent = visible(data.source);
    /* null stands for all steps, as does the slider's left end. */
    this.shownStep = null;
    this.steps = [null, ...[...new Set(data.groups.map((group) => group.step))].filter((step) => step !== null).sort((a, b) => a - b)];
    byId("stepper").hidden = this.steps.length < 3;
    byId("step").max = this.steps.length - 1;
    byId("stepName").textContent = "all";
    this.listen();
    this.chooseGroup(0);
  }

  /* One finger on the whole tree scrolls the page past it. */
  mayZoom(event) {
    const scrolls = event.type.startsWith("touch") && event.touches.length < 2 && this.transform.k === 1;
    return !event.button && event.type !== "dblclick" && !scrolls;
  }

  chooseGroup(index) {
    const group = this.data.groups[index];
    group.idList ??= new Int32Array(Uint8Array.from(atob(group.ids), (sign) => sign.charCodeAt(0)).buffer);
    Object.assign(this.state, { layout: new Layout(group), selected: -1, row: -1, onPath: null, wholePath: false });
    if (!(this.state.measure in group.tracks)) this.state.measure = "role";
    this.words = null;
    listGroups(this.data, index, this.shownStep, (chosen) => this.chooseGroup(chosen));
    listMeasures(this.data.measures, group.tracks, this.state.measure, (key) => this.colourBy(key));
    showFacts(group);
    this.search(byId("search").value);
    this.fit();
    this.colourBy(this.state.measure);
    this.select(-1);
  }

  chooseStep(at) {
    const step = (this.shownStep = this.steps[at]);
    byId("stepName").textContent = step ?? "all";
    this.chooseGroup(this.data.groups.findIndex((group) => step === null || group.step === step));
  }

  colourBy(key) {
    const measure = this.data.measures.find((one) => one.key === key);
    this.state.measure = key;
    this.state.scale = scaleOf(measure, this.state.layout.group.tracks[key], this.data.roles);
    showLegend(measure, this.state.scale);
    this.draw();
  }

  /* The base window: all, or a subtree. */
  fit(segment = -1) {
    const { layout } = this.state, { group } = layout;
    let to = { x0: 0, x1: group.depth, y0: 0, y1: layout.totalLanes };
    if (segment >= 0) {
      const behind = layout.behind(segment);
      const deepest = layout.collapsed.has(segment) ? layout.end[segment] : layout.end.slice(segment, behind).reduce((a, b) => Math.max(a, b), 0);
      to = { x0: group.segments.depth[segment], x1: deepest, y0: layout.top[segment], y1: layout.top[segment] + layout.lanes[segment] };
    }
    this.base = to;
    this.zoomed = segment;
    this.transform = d3.zoomIdentity;
    const { width, height } = this.tree.getBoundingClientRect();
    const closest = Math.max((CLOSEST * (to.x1 - to.x0)) / width, (CLOSEST * (to.y1 - to.y0)) / height, 1);
    this.zoom.scaleExtent([1, closest]).extent([[0, AXIS], [width, height]]).translateExtent([[0, AXIS], [width, height]]);
    // Also draws.
    d3.select(this.tree).call(this.zoom.transform, d3.zoomIdentity);
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.drawNow();
    });
  }

  drawNow() {
    const { width, height } = this.tree.getBoundingClientRect(), { base, transform: t, state } = this;
    const perX = (base.x1 - base.x0) / width, perY = (base.y1 - base.y0) / (height - AXIS);
    state.window = {
      x0: base.x0 + t.invertX(0) * perX,
      x1: base.x0 + t.invertX(width) * perX,
      y0: base.y0 + (t.invertY(AXIS) - AXIS) * perY,
      y1: base.y0 + (t.invertY(height) - AXIS) * perY,
    };
    Object.assign(state, { page: token("page"), ink: token("ink"), soft: token("soft"), line: token("line"), mark: token("mark") });
    state.label = (segment, tokens, signs) => this.labelOf(segment, tokens, signs);
    drawTree(this.tree, state);
    drawCurve(byId("curve"), state);
  }

  /* What a segment's box says from a token on: its text, or nothing without a tokenizer. */
  labelOf(segment, tokens, signs) {
    const { layout } = this.state, { group } = layout;
    if (!group.text) return "";
    let words = "";
    const most = signs + 40;
    layout.eachRun("role", segment, (offset, length, run) => {
      if (words.length >= most || offset + length <= tokens) return;
      const text = group.text[run];
      words += text.slice(Math.floor((text.length * Math.max(tokens - offset, 0)) / length)).slice(0, most);
    });
    return visible(words.replace(HEADER, "").slice(0, signs)).replace(/\s+/g, " ");
  }

  select(segment, { show = true } = {}) {
    const { state } = this;
    if (segment !== state.selected) state.wholePath = false;
    state.selected = segment;
    if (segment >= 0) {
      state.layout.reveal(segment);
      if (show) this.bringIntoView(segment);
      byId("spoken").textContent = nameOf(state.layout, segment);
    }
    byId("collapse").disabled = segment < 0 || !state.layout.children[segment].length;
    this.showPanel();
    this.draw();
  }

  showPanel() {
    showSegment(this.data, this.state, {
      togglePath: () => ((this.state.wholePath = !this.state.wholePath), this.showPanel()),
      chooseRow: (row) => this.chooseRow(row),
    });
  }

  chooseRow(row) {
    const { state } = this, { layout } = state;
    state.row = row === state.row ? -1 : row;
    const end = layout.group.paths.end[row];
    state.onPath = state.row < 0 ? null : new Set([...layout.ancestors(end), end]);
    this.showPanel();
    this.draw();
  }

  /* Fits the whole tree where a segment lies outside the window. */
  bringIntoView(segment) {
    const { layout, window: view } = this.state, top = layout.top[segment];
    if (!view) return;
    const inside = top < view.y1 && top + layout.lanes[segment] > view.y0;
    if (!inside || layout.end[segment] <= view.x0 || layout.group.segments.depth[segment] >= view.x1) this.fit();
  }

  collapse() {
    const { layout, selected } = this.state;
    if (selected < 0) return;
    layout.toggle(selected);
    this.fit();
  }

  step(key) {
    const { layout, selected } = this.state, { parent } = layout.group.segments;
    if (selected < 0) return this.select(layout.roots[0]);
    const above = parent[selected];
    if (key === "ArrowLeft") return above >= 0 && this.select(above);
    if (key === "ArrowRight") {
      if (layout.collapsed.has(selected)) this.collapse();
      return layout.children[selected].length && this.select(layout.children[selected][0]);
    }
    this.select(this.neighbour(selected, key === "ArrowDown" ? 1 : -1));
  }

  /* The sibling before or behind, or that of the nearest ancestor which has one. */
  neighbour(segment, step) {
    const { layout } = this.state, { parent } = layout.group.segments;
    for (let s = segment; s >= 0; s = parent[s]) {
      const level = parent[s] < 0 ? layout.roots : layout.children[parent[s]];
      const next = level[level.indexOf(s) + step];
      if (next !== undefined) return next;
    }
    return segment;
  }

  search(query) {
    const { state } = this, { layout } = state, wanted = query.trim().toLowerCase();
    state.matches = new Set();
    this.found = [];
    if (wanted) {
      this.words ??= segmentWords(layout);
      this.found = this.words.flatMap((words, segment) => (words.includes(wanted) ? [segment] : []));
      state.matches = new Set(this.found);
    }
    byId("found").textContent = wanted ? `${whole.format(this.found.length)} found` : "";
    this.draw();
  }

  nextMatch(step = 1) {
    if (!this.found.length) return;
    const { selected } = this.state, size = this.found.length;
    const behind = this.found.findIndex((segment) => segment > selected);
    const before = this.found.findLastIndex((segment) => segment < selected);
    const at = step > 0 ? (behind < 0 ? 0 : behind) : before < 0 ? size - 1 : before;
    byId("found").textContent = `${at + 1} of ${size}`;
    this.select(this.found[at]);
  }

  /* One step back: search, row, zoom, choice. */
  escape() {
    const { state } = this;
    if (state.matches.size || byId("search").value) {
      byId("search").value = "";
      this.search("");
      this.tree.focus();
    } else if (state.row >= 0) this.chooseRow(state.row);
    else if (this.zoomed >= 0 || this.transform.k !== 1) this.fit();
    else this.select(-1);
  }

  press(event) {
    const typing = event.target.matches("input, select"), { key } = event;
    if (key === "Escape") return this.escape();
    if (event.target.id === "search" && key === "Enter") return this.nextMatch(event.shiftKey ? -1 : 1);
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (key === "/") {
      event.preventDefault();
      return byId("search").focus();
    }
    if (key === "n" || key === "N") return this.nextMatch(key === "n" ? 1 : -1);
    if (event.target !== this.tree) return;
    const acts = {
      Enter: () => this.state.selected >= 0 && this.fit(this.state.selected),
      " ": () => this.collapse(),
      0: () => this.fit(),
      "+": () => this.zoom.scaleBy(d3.select(this.tree), 1.5),
      "=": () => this.zoom.scaleBy(d3.select(this.tree), 1.5),
      "-": () => this.zoom.scaleBy(d3.select(this.tree), 1 / 1.5),
    };
    const act = key.startsWith("Arrow") ? () => this.step(key) : acts[key];
    if (act) {
      event.preventDefault();
      act();
    }
  }

  hit(event) {
    const { window: view, layout } = this.state, { width, height, left, top } = this.tree.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    if (!view || y < AXIS) return -1;
    const lane = view.y0 + ((y - AXIS) / (height - AXIS)) * (view.y1 - view.y0);
    return layout.at(view.x0 + (x / width) * (view.x1 - view.x0), lane);
  }

  hover(event) {
    const tip = byId("tip"), segment = this.hit(event);
    tip.hidden = segment < 0;
    if (segment < 0) return;
    const { left, top, width } = this.tree.getBoundingClientRect();
    const cause = this.state.layout.group.segments.cause[segment];
    tip.replaceChildren(nameOf(this.state.layout, segment), ...(cause ? [element("br"), `because of: ${cause}`] : []),
      element("br"), this.labelOf(segment, 0, 90));
    tip.style.left = `${Math.max(0, Math.min(event.clientX - left + 14, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - top + 18}px`;
  }

  listen() {
    const { tree } = this;
    document.addEventListener("keydown", (event) => this.press(event));
    tree.addEventListener("click", (event) => (this.select(this.hit(event), { show: false }), this.hover(event)));
    tree.addEventListener("dblclick", (event) => this.hit(event) >= 0 && this.fit(this.hit(event)));
    tree.addEventListener("pointermove", (event) => this.hover(event));
    tree.addEventListener("pointerleave", () => (byId("tip").hidden = true));
    tree.addEventListener("focus", () => this.state.selected < 0 && tree.matches(":focus-visible") && this.select(this.state.layout.roots[0]));
    byId("search").addEventListener("input", (event) => this.search(event.target.value));
    byId("step").addEventListener("input", (event) => this.chooseStep(Number(event.target.value)));
    byId("fit").addEventListener("click", () => this.fit());
    byId("collapse").addEventListener("click", () => this.collapse());
    byId("keys").addEventListener("click", (event) => {
      const help = byId("help");
      help.hidden = !help.hidden;
      event.currentTarget.setAttribute("aria-expanded", String(!help.hidden));
    });
    byId("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      this.colourBy(this.state.measure);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.colourBy(this.state.measure));
    new ResizeObserver(() => this.fit(this.zoomed)).observe(tree);
  }
}

/* What search looks through in each segment: text or token ids, and the names of rows that end there. */
function segmentWords(layout) {
  const { group } = layout, words = [];
  for (let s = 0; s < layout.size; s++) {
    let text = "";
    layout.eachRun("role", s, (_, length, run) => (text += (group.text ? "" : " ") + runText(group, run, length)));
    words.push(text.toLowerCase());
  }
  group.paths.end.forEach((segment, row) => (words[segment] += `\n${group.paths.name[row].toLowerCase()}`));
  return words;
}

if (matchMedia("(max-width: 1000px)").matches) byId("groups").open = false;
unpack("data").then((data) => (window.viewer = new Viewer(data)));
