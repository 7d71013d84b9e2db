/* The groups, the legend and the segment that is chosen, as elements. */

const MOST_TEXT = 20_000, MOST_ROWS = 200;

/* How a group's first question begins: what its task is. Empty without a tokenizer. */
function taskOf({ text, tracks }, roles) {
  const user = roles.indexOf("user"), { value } = tracks.role;
  let run = text ? value.indexOf(user) : -1, words = "";
  // Where rows branch inside the question, the runs of the heaviest one follow.
  for (; run >= 0 && value[run] === user && words.length < 90; run++) words += text[run].replace(HEADER, "");
  return visible(words).replace(/\s+/g, " ").trim().slice(0, 90);
}

/* The groups of a step, or all for null. */
function listGroups({ groups, roles }, chosen, step, choose) {
  const listed = groups.map((_, index) => index).filter((index) => step === null || groups[index].step === step);
  document.getElementById("groupsTitle").textContent = `${count(listed.length, "group")}, highest POR first`;
  document.getElementById("groupList").replaceChildren(
    ...listed.map((index) => {
      const group = groups[index], task = taskOf(group, roles);
      const bar = element("i");
      bar.style.width = `${100 * group.por}%`;
      const facts = `POR ${group.por.toFixed(3)} · ${count(group.rows, "row")} · ${count(group.unique, "token")}`;
      const name = visible(group.name).slice(0, 120);
      const button = element("button", { type: "button", "aria-current": String(index === chosen), onclick: () => choose(index) },
        name, ...(task ? [element("em", { dir: "auto" }, task)] : []), element("small", {}, facts), element("span", { class: "bar", "aria-hidden": "true" }, bar));
      return element("li", {}, button);
    }),
  );
}

function showFacts(group) {
  const causes = Object.entries(group.causes).map(([cause, times]) => `${whole.format(times)} by ${cause}`);
  const bold = (words) => element("b", {}, words);
  document.getElementById("facts").replaceChildren(
    bold(count(group.flat, "token")), " in ", bold(count(group.rows, "row")), ", ", bold(whole.format(group.unique)),
    " in the tree: POR ", bold(group.por.toFixed(3)), ", token bound ", bold(`${group.bound.toFixed(2)}x`), ". ",
    causes.length ? `Branches: ${causes.join(", ")}.` : "No branches.",
  );
  document.getElementById("curveCaption").replaceChildren(
    "Active at each depth:", swatch(CURVE.rows), "rows", swatch(CURVE.distinct), "distinct prefixes. ",
    `The areas are in the ratio ${group.bound.toFixed(2)}.`,
  );
  const said = `At depth 0: ${count(group.rows, "row")} and ${count(group.trees, "tree")}; the longest row has ${count(group.depth, "token")}.`;
  document.getElementById("curve").setAttribute("aria-label", `Rows and distinct prefixes over depth. ${said}`);
}

function swatch(colour) {
  const made = element("i", { "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}

function showLegend(measure, scale) {
  const parts = scale.legend.map(([colour, words]) => element("span", {}, swatch(colour), words));
  if (scale.ramp) {
    const [hues, low, high] = scale.ramp, bar = swatch("");
    bar.className = hues.length > 1 ? "ramp" : "";
    bar.style.background = hues.length > 1 ? `linear-gradient(90deg, ${hues.join(", ")})` : hues[0];
    parts.unshift(element("span", {}, low, bar, high));
  }
  const about = element("span", {}, `${measure.name}: ${measure.about}`);
  document.getElementById("legend").replaceChildren(...parts, about);
}

function listMeasures(measures, tracks, chosen, choose) {
  const select = document.getElementById("measure");
  const options = measures.map((measure) => {
    const made = element("option", { value: measure.key }, measure.key in tracks ? measure.name : `${measure.name} (missing)`);
    made.disabled = !(measure.key in tracks);
    made.selected = measure.key === chosen;
    return made;
  });
  select.replaceChildren(...options);
  select.onchange = () => choose(select.value);
  const missing = measures.filter((measure) => !(measure.key in tracks)).map((measure) => `${measure.name}: ${measure.missing}`);
  document.getElementById("missing").textContent = missing.length ? `Missing here. ${missing.join(". ")}.` : "";
}

function nameOf(layout, segment) {
  const { depth, paths, length } = layout.group.segments;
  const tokens = `tokens ${whole.format(depth[segment])} to ${whole.format(layout.end[segment] - 1)}`;
  return `Segment ${segment}: ${tokens} (${whole.format(length[segment])}), ${count(paths[segment], "row")}`;
}

/* Text of one run; long text on demand. */
function runElement(colour, title, text) {
  const shown = visible(text.slice(0, MOST_TEXT)), box = element("pre", { dir: "auto" }, shown);
  const made = element("div", { class: "run" }, element("div", { class: "chip" }, swatch(colour), title), box);
  if (text.length > MOST_TEXT) {
    const more = element("button", { type: "button", onclick: () => (box.textContent = visible(text), more.remove()) },
      `Show all ${whole.format(text.length)} characters`);
    made.append(more);
  }
  return made;
}

function runsOf(data, layout, segment) {
  const { tracks } = layout.group, made = [];
  layout.eachRun("role", segment, (offset, length, run) => {
    const role = data.roles[tracks.role.value[run]];
    made.push(runElement(ROLE_COLOURS[role], `${role}, ${count(length, "token")}`, runText(layout.group, run, length)));
  });
  return made;
}

/* Decoded text of a run of roles, or its token ids. */
function runText(group, run, length) {
  if (group.text) return group.text[run];
  const start = group.tracks.role.start[run];
  return Array.from(group.idList.subarray(start, start + length)).join(" ");
}

function showSegment(data, state, act) {
  const panel = document.getElementById("panel"), { layout, selected: segment } = state;
  if (segment < 0) {
    panel.replaceChildren(element("h2", {}, "No segment chosen"), element("p", { class: "soft" }, "Click a box of the tree, or move with the arrow keys."));
    return;
  }
  const { group } = layout, cause = group.segments.cause[segment];
  const facts = data.measures
    .filter((measure) => measure.kind !== "class" && measure.key !== "paths" && measure.key in group.tracks)
    .map((measure) => `${measure.name.toLowerCase()} ${figure(layout.mean(measure.key, segment))}`);
  const parts = [element("h2", {}, nameOf(layout, segment))];
  if (cause) parts.push(element("p", {}, `Leaves its sibling because of: ${cause}`));
  if (facts.length) parts.push(element("p", {}, `Mean here: ${facts.join(", ")}`));
  const before = layout.ancestors(segment);
  if (before.length) {
    const words = state.wholePath ? "This segment alone" : `Show the ${count(before.length, "segment")} before it`;
    parts.push(element("button", { type: "button", onclick: act.togglePath }, words));
  }
  const shown = state.wholePath ? [...before, segment] : [segment];
  parts.push(element("h3", {}, group.text ? "Text" : "Token ids (--tokenizer shows text)"));
  for (const one of shown) parts.push(...runsOf(data, layout, one));
  parts.push(element("h3", {}, `Rows through it`), rowTable(layout, segment, state.row, act.chooseRow));
  panel.replaceChildren(...parts);
}

function rowTable(layout, segment, chosen, choose) {
  const { paths } = layout.group, rows = layout.rowsThrough(segment);
  const head = element("tr", {}, ...["row", "reward", "tokens"].map((name) => element("th", { scope: "col" }, name)));
  const lines = rows.slice(0, MOST_ROWS).map((row) => {
    const pressed = String(row === chosen);
    const button = element("button", { type: "button", "aria-pressed": pressed, onclick: () => choose(row) }, visible(paths.name[row]));
    return element("tr", {}, element("td", {}, button), element("td", {}, figure(paths.reward[row])), element("td", {}, whole.format(paths.tokens[row])));
  });
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
  if (rows.length <= MOST_ROWS) return table;
  return element("div", {}, table, element("p", { class: "soft" }, `and ${whole.format(rows.length - MOST_ROWS)} more`));
}
