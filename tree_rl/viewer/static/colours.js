/* Colours of the measures. Classes repeat their hues beyond the palette's end; the legend says so. */

const ROLE_COLOURS = { given: "#8d95a1", system: "#7b6fc4", user: "#3987c9", tool: "#d9912b", assistant: "#8cc5a2", model: "#1f9a62" };
const PALETTE = ["#3987c9", "#d9912b", "#1f9a62", "#c4517c", "#7b6fc4", "#a9842f", "#34a3a8", "#b4573c", "#6f8f2f", "#9a5fb0"];
const RAMP = { light: ["#dbe9f6", "#0b4f94"], dark: ["#27405c", "#a6d3ff"] };
const CHANGE = { light: ["#b2182b", "#e8dcc0", "#1c62a8"], dark: ["#ff7b6b", "#5d5542", "#6db3ff"] };
const CURVE = { rows: "#b9793a", distinct: "#3987c9" };

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/* {of: run -> colour, legend: [[colour, words]], ramp: [colours, words] or null} of a measure in a group. */
function scaleOf(measure, track, roles) {
  const none = token("none"), theme = isDark() ? "dark" : "light";
  const values = track.value.filter((value) => value !== null);
  const hasNone = values.length < track.value.length;
  const legend = hasNone ? [[none, "no value"]] : [];
  if (measure.kind === "class") {
    const colour = measure.key === "role" ? (value) => ROLE_COLOURS[roles[value]] : (value) => PALETTE[value % PALETTE.length];
    const present = [...new Set(values)].sort((a, b) => a - b);
    const name = (value) => (measure.key === "role" ? roles[value] : measure.key === "partition" ? `forward ${value + 1}` : `weights ${value}`);
    const named = present.slice(0, PALETTE.length).map((value) => [colour(value), name(value)]);
    if (present.length > PALETTE.length) named.push(["transparent", `${present.length} in all; colours repeat`]);
    return { of: pick(track, colour, none), legend: [...named, ...legend], ramp: null };
  }
  let low = Infinity, high = -Infinity;
  for (const value of values) (low = Math.min(low, value)), (high = Math.max(high, value));
  if (measure.kind === "change") {
    const sizes = Float64Array.from(values, Math.abs).sort();
    // Few extremes would leave all others without colour.
    const most = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1, hues = CHANGE[theme];
    const [down, up] = [d3.interpolateLab(hues[1], hues[0]), d3.interpolateLab(hues[1], hues[2])];
    const colour = cached((value) => (value < 0 ? down(Math.min(1, -value / most)) : up(Math.min(1, value / most))), most / 64);
    return { of: pick(track, colour, none), legend, ramp: [hues, `≤ ${figure(-most)}`, `≥ ${figure(most)}`] };
  }
  const hues = RAMP[theme], between = d3.interpolateLab(...hues), width = high - low || 1;
  const colour = cached((value) => between(high === low ? 1 : (value - low) / width), width / 64);
  return { of: pick(track, colour, none), legend, ramp: high === low ? [[hues[1]], "", figure(high)] : [hues, figure(low), figure(high)] };
}

const pick = (track, colour, none) => (run) => (track.value[run] === null ? none : colour(track.value[run]));

/* Few distinct colours: the canvas parses each only once in a row. */
function cached(colour, step) {
  const known = new Map();
  return (value) => {
    const key = Math.round(value / step);
    if (!known.has(key)) known.set(key, colour(key * step));
    return known.get(key);
  };
}

function inkOn(colour) {
  const { r, g, b } = d3.rgb(colour);
  return 0.299 * r + 0.587 * g + 0.114 * b > 105 ? "#10141a" : "#ffffff";
}
