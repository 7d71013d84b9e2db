/* Where the segments of a group lie: x is the depth in tokens, y counts lanes, one a leaf. Segments are in preorder. */

class Layout {
  constructor(group) {
    this.group = group;
    const { parent, length, depth, start } = group.segments;
    this.size = parent.length;
    this.children = parent.map(() => []);
    this.roots = [];
    parent.forEach((above, segment) => (above < 0 ? this.roots : this.children[above]).push(segment));
    this.end = depth.map((tokens, segment) => tokens + length[segment]);
    this.rowsEnding = new Array(this.size).fill(0);
    group.paths.end.forEach((segment) => this.rowsEnding[segment]++);
    this.firstRun = Object.fromEntries(
      Object.entries(group.tracks).map(([key, track]) => [key, firstRuns(track.start, start)]),
    );
    this.collapsed = new Set();
    this.arrange();
  }

  arrange() {
    const { parent } = this.group.segments;
    this.hidden = new Uint8Array(this.size);
    this.lanes = new Float64Array(this.size);
    this.top = new Float64Array(this.size);
    for (let s = 0; s < this.size; s++) {
      const above = parent[s];
      this.hidden[s] = above >= 0 && (this.hidden[above] || this.collapsed.has(above)) ? 1 : 0;
    }
    for (let s = this.size - 1; s >= 0; s--) {
      if (this.hidden[s]) continue;
      this.lanes[s] = Math.max(this.lanes[s], 1);
      if (parent[s] >= 0) this.lanes[parent[s]] += this.lanes[s];
    }
    const next = new Float64Array(this.size);
    this.totalLanes = 0;
    for (let s = 0; s < this.size; s++) {
      if (this.hidden[s]) continue;
      const above = parent[s];
      this.top[s] = above < 0 ? this.totalLanes : next[above];
      if (above < 0) this.totalLanes += this.lanes[s];
      else next[above] += this.lanes[s];
      next[s] = this.top[s];
    }
  }

  toggle(segment) {
    if (!this.children[segment].length) return;
    if (!this.collapsed.delete(segment)) this.collapsed.add(segment);
    this.arrange();
  }

  /* Opens what hides a segment. */
  reveal(segment) {
    if (!this.hidden[segment]) return;
    for (const above of this.ancestors(segment)) this.collapsed.delete(above);
    this.arrange();
  }

  /* Root first, without the segment. */
  ancestors(segment) {
    const found = [];
    for (let s = this.group.segments.parent[segment]; s >= 0; s = this.group.segments.parent[s]) found.unshift(s);
    return found;
  }

  at(tokens, lane) {
    let level = this.roots;
    for (;;) {
      const hit = level.find((s) => lane >= this.top[s] && lane < this.top[s] + this.lanes[s]);
      if (hit === undefined || tokens < this.group.segments.depth[hit]) return -1;
      if (tokens < this.end[hit]) return hit;
      if (this.collapsed.has(hit)) return -1;
      level = this.children[hit];
    }
  }

  /* First segment behind the subtree. */
  behind(segment) {
    const { depth } = this.group.segments;
    let s = segment + 1;
    while (s < this.size && depth[s] > depth[segment]) s++;
    return s;
  }

  rowsThrough(segment) {
    const behind = this.behind(segment);
    return this.group.paths.end.flatMap((end, row) => (end >= segment && end < behind ? [row] : []));
  }

  /* Calls `visit(first token in the segment, tokens, run)` for each run of a track in a segment. */
  eachRun(key, segment, visit) {
    const { start: starts } = this.group.tracks[key];
    const { start, length } = this.group.segments;
    const end = start[segment] + length[segment];
    for (let run = this.firstRun[key][segment]; run < starts.length && starts[run] < end; run++) {
      const stop = run + 1 < starts.length ? Math.min(starts[run + 1], end) : end;
      visit(starts[run] - start[segment], stop - starts[run], run);
    }
  }

  mean(key, segment) {
    let sum = 0, tokens = 0;
    this.eachRun(key, segment, (_, length, run) => {
      const value = this.group.tracks[key].value[run];
      if (value !== null) (sum += value * length), (tokens += length);
    });
    return tokens ? sum / tokens : null;
  }
}

/* Every segment's start begins a run; both lists ascend. */
function firstRuns(runStarts, segmentStarts) {
  const first = new Int32Array(segmentStarts.length);
  let run = 0;
  segmentStarts.forEach((start, segment) => {
    while (runStarts[run] < start) run++;
    first[segment] = run;
  });
  return first;
}
