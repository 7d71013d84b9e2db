/* Draws a layout and the curve below it on canvases: 5,000 segments are rectangles there, not nodes. */

const MARGIN = 1, AXIS = 20, LABEL = 11, THINNEST = 0.75, COARSE = 3;

/* Fits a canvas to its box and the screen's pixels; returns its context and size in CSS pixels. */
function sized(canvas) {
  const { width, height } = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/* window: {x0, x1, y0, y1} in tokens and lanes. */
function drawTree(canvas, state) {
  const { context, width, height } = sized(canvas);
  const { layout, window: view, scale, label } = state;
  const kx = width / (view.x1 - view.x0), ky = (height - AXIS) / (view.y1 - view.y0);
  const { depth } = layout.group.segments;
  const places = { x: (tokens) => (tokens - view.x0) * kx, y: (lane) => AXIS + (lane - view.y0) * ky, kx, ky };
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  for (let s = 0; s < layout.size; s++) {
    if (layout.hidden[s]) continue;
    const left = places.x(depth[s]), right = places.x(layout.end[s]);
    const top = places.y(layout.top[s]), tall = layout.lanes[s] * ky;
    if (right < 0 || left > width || top > height || top + tall < AXIS) continue;
    // Of lanes that share a row of pixels, one is drawn.
    if (tall < 1 && Math.floor(top + tall) === Math.floor(top)) continue;
    const gap = Math.min(MARGIN, tall / 6);
    context.globalAlpha = state.onPath && !state.onPath.has(s) ? 0.3 : 1;
    drawRuns(context, layout, s, state, left, kx, top + gap, tall - gap, width);
    if (right - left > 3 && tall > 5) {
      context.fillStyle = state.page;
      context.fillRect(right - 1, top, 1, tall);
    }
    if (layout.collapsed.has(s)) drawCollapsed(context, state, right, top, tall);
    else if (layout.rowsEnding[s] && layout.children[s].length && tall > 4 && right - left > 8) drawNotch(context, state, right, top, tall);
    if (label) drawLabel(context, state, s, left, right, top, tall, width, kx);
    if (state.matches.has(s)) outline(context, state.mark, left, right, top, tall, 2);
  }
  context.globalAlpha = 1;
  const s = state.selected;
  if (s >= 0 && !layout.hidden[s]) {
    const tall = layout.lanes[s] * ky, top = places.y(layout.top[s]);
    outline(context, state.ink, places.x(depth[s]), places.x(layout.end[s]), top, tall, 2.5);
  }
  context.restore();
  drawAxis(context, state, view, width, kx);
}

/* Runs thinner than a pixel join the next one; in boxes as thin, those thinner than three. */
function drawRuns(context, layout, segment, state, left, kx, top, tall, width) {
  let from = left, colour = null;
  const least = tall < COARSE ? COARSE : THINNEST;
  const fill = (to) => {
    if (colour === null || to < 0 || from > width) return;
    if (context.fillStyle !== colour) context.fillStyle = colour;
    context.fillRect(Math.max(from, -2), top, Math.max(Math.min(to, width + 2) - Math.max(from, -2), THINNEST), Math.max(tall, THINNEST));
  };
  layout.eachRun(state.measure, segment, (offset, length, run) => {
    const begin = left + offset * kx, next = state.scale.of(run);
    if (next === colour) return;
    if (colour !== null && begin - from >= least) {
      fill(begin);
      from = begin;
    }
    colour = next;
  });
  fill(left + layout.group.segments.length[segment] * kx);
}

function outline(context, colour, left, right, top, tall, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(left + line / 2, top + line / 2, Math.max(right - left - line, 1), Math.max(tall - line, 1));
}

function drawCollapsed(context, state, right, top, tall) {
  const size = Math.min(7, tall / 2), middle = top + tall / 2;
  context.fillStyle = state.ink;
  context.beginPath();
  context.moveTo(right + 2, middle - size);
  context.lineTo(right + 2 + size, middle);
  context.lineTo(right + 2, middle + size);
  context.fill();
}

function drawNotch(context, state, right, top, tall) {
  context.fillStyle = state.page;
  const size = Math.min(5, tall / 3);
  context.beginPath();
  context.moveTo(right - size, top);
  context.lineTo(right + size, top);
  context.lineTo(right, top + size * 1.4);
  context.fill();
}

/* The segment's first words, where they fit. */
function drawLabel(context, state, segment, left, right, top, tall, width, kx) {
  const from = Math.max(left, 0), room = Math.min(right, width) - from - 10;
  if (tall < LABEL + 5 || room < 60) return;
  const words = state.label(segment, Math.max(0, Math.floor((from - left) / kx)), Math.floor(room / 5.5));
  if (!words) return;
  let colour = null;
  state.layout.eachRun(state.measure, segment, (offset, _, run) => {
    if (left + offset * kx <= from + 1) colour = state.scale.of(run);
  });
  context.save();
  context.beginPath();
  context.rect(from, top, room + 6, tall);
  context.clip();
  context.font = `${LABEL}px ui-monospace, monospace`;
  context.textBaseline = "middle";
  context.fillStyle = inkOn(colour ?? state.page);
  context.fillText(words, from + 5, Math.max(top, AXIS) + (Math.min(top + tall, 1e5) - Math.max(top, AXIS)) / 2);
  context.restore();
}

function ticks(low, high, most) {
  const rough = Math.max((high - low) / most, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((wide) => wide >= rough);
  const found = [];
  for (let at = Math.ceil(Math.max(low, 0) / step) * step; at <= high; at += step) found.push(at);
  return found;
}

function drawAxis(context, state, view, width, kx) {
  context.fillStyle = state.soft;
  context.strokeStyle = state.line;
  context.lineWidth = 1;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  for (const at of ticks(view.x0, view.x1, Math.max(2, width / 110))) {
    const x = (at - view.x0) * kx, words = whole.format(at);
    const wide = context.measureText(words).width;
    context.textAlign = "left";
    context.fillText(words, Math.min(Math.max(x - wide / 2, 0), width - wide), 2);
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, AXIS);
    context.stroke();
  }
}

/* Rows, and distinct prefixes, that go on at each depth: the areas are flat and unique tokens. */
function drawCurve(canvas, state) {
  const { context, width, height } = sized(canvas);
  const { window: view, layout } = state, { at, rows, distinct } = layout.group.active;
  const most = Math.max(...rows, 1), low = height - 4, kx = width / (view.x1 - view.x0);
  const x = (tokens) => (tokens - view.x0) * kx, y = (value) => low - (value / most) * (low - 16);
  for (const [values, colour] of [[rows, CURVE.rows], [distinct, CURVE.distinct]]) {
    context.beginPath();
    context.moveTo(x(at[0]), low);
    at.forEach((tokens, step) => {
      context.lineTo(x(tokens), y(values[step]));
      context.lineTo(x(at[step + 1] ?? tokens), y(values[step]));
    });
    context.lineTo(x(at.at(-1)), low);
    context.globalAlpha = 0.85;
    context.fillStyle = colour;
    context.fill();
  }
  context.globalAlpha = 1;
  context.fillStyle = state.soft;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(count(most, "row"), 2, 1);
}
