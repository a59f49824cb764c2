// Paints a timeline's view: near by every stretch, from afar the shares of time in each column of
// pixels.

import { LOOKS, TILE, coloursOf } from "./looks.js";
import { Pixels } from "./pixels.js";
import { axisText, niceStep } from "./words.js";

export const LABEL_WIDTH = 58;
export const COHORT_HEIGHT = 16;
export const PHASE_HEIGHT = 22;
export const QUEUE_HEIGHT = 34;
export const AXIS_HEIGHT = 20;
const LINE_SPACE = 18; // pixels per line, on the average
const LINES_MIN = 6; // pixels per line; closer ones are only counted
const LABEL_MIN = 24; // pixels; narrower stretches get none
const LABEL_AGAIN = 240; // pixels between labels of the same request
const COARSE_PX = 2; // narrower entries, on the average, are shown as shares
const QUEUE_PER_PX = 20; // entries of the queue that are looked at one by one

export class Painter {
  constructor(view) {
    this.view = view;
    this.context = view.canvas.getContext("2d");
    this.pixels = new Pixels(this.context);
    this.shift = 0;
    this.themeChanged();
  }

  themeChanged() {
    this.pixels.themeChanged();
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ink = { text: read("--text"), quiet: read("--quiet"), line: read("--line") };
    this.ink.back = read("--panel");
    this.ink.mark = read("--mark");
  }

  draw() {
    const { context } = this;
    const { history } = this.view;
    const height = this.view.canvas.clientHeight;
    context.clearRect(0, 0, this.view.width + LABEL_WIDTH, height);
    if (!history || !this.view.nsPerPx) return;
    this.shift = -((this.view.fromNs / this.view.nsPerPx) % TILE); // patterns move with the time
    context.save();
    context.beginPath();
    context.rect(LABEL_WIDTH, 0, this.view.width, height);
    context.clip();
    const isCoarse = this.areSlotsCoarse();
    for (const lane of this.view.lanes) {
      if (lane.kind === "cohort") continue; // with the lines, below
      if (lane.kind === "phase" && this.isCoarse(this.view.history.turns)) {
        this.drawShares(lane, this.view.history.phaseRow);
      } else if (lane.kind === "phase") this.drawPhase(lane);
      else if (lane.kind === "queue") this.drawQueue(lane);
      else if (isCoarse) this.drawShares(lane, lane.slot);
      else this.drawStretches(lane);
    }
    this.drawTurns(height);
    this.drawEnds();
    this.drawGaps(height);
    this.drawAxis(height);
    this.drawCursor();
    context.restore();
    this.drawLabels();
  }

  // Whether a series is to be shown by shares: it is forgotten, or too dense.
  isCoarse(series) {
    const { fromNs, spanNs, width } = this.view;
    if (series.forgotten && series.oldest() > fromNs) return true;
    return series.count(fromNs, fromNs + spanNs) > width / COARSE_PX;
  }

  // All alike, so that they can be compared.
  areSlotsCoarse() {
    return this.view.history.lanes.some((lane) => this.isCoarse(lane));
  }

  drawStretches({ slot, y, height }) {
    const { pixels } = this;
    const { history, fromNs, nsPerPx } = this.view;
    const series = history.lanes[slot];
    pixels.begin(LABEL_WIDTH, y, this.view.width, height);
    const { at, look, request } = series.columns;
    const nsPerColumn = nsPerPx / pixels.ratio;
    const end = fromNs + this.view.spanNs;
    const names = [];
    let named = { request: -1, x: -LABEL_AGAIN };
    for (let i = Math.max(0, series.find(fromNs)); i < series.length && at[i] < end; i++) {
      const until = i + 1 < series.length ? at[i + 1] : this.view.nowNs();
      pixels.stretch(look[i], (at[i] - fromNs) / nsPerColumn, (until - fromNs) / nsPerColumn);
      const x = Math.max(LABEL_WIDTH, this.view.toX(at[i]));
      const isNew = request[i] !== named.request || x - named.x > LABEL_AGAIN;
      if (request[i] >= 0 && isNew && this.view.toX(until) - x >= LABEL_MIN) {
        named = { request: request[i], x, right: this.view.toX(until) };
        names.push(named);
      }
    }
    pixels.endStretches(this.shift);
    if (height < LABEL_MIN / 2) return;
    for (const { request: id, x, right } of names) this.label(id, x, right, y, height);
  }

  label(request, left, right, y, height) {
    const text = `#${request}`;
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    const width = context.measureText(text).width;
    if (right - left < width + 10) return;
    context.textBaseline = "middle";
    context.fillStyle = this.ink.back;
    context.globalAlpha = 0.88;
    context.fillRect(left + 3, y + height / 2 - 7, width + 6, 14);
    context.globalAlpha = 1;
    context.fillStyle = this.ink.text;
    context.fillText(text, left + 6, y + height / 2 + 0.5);
  }

  drawShares({ y, height }, row) {
    const { pixels } = this;
    const { history, fromNs, nsPerPx, width } = this.view;
    const level = history.levelFor(nsPerPx, fromNs);
    const sums = new Float64Array(LOOKS.length);
    pixels.begin(LABEL_WIDTH, y, width, height);
    const perColumn = nsPerPx / pixels.ratio / level.width;
    const first = fromNs / level.width;
    for (let column = 0; column < pixels.width; column++) {
      const from = Math.floor(first + column * perColumn);
      const to = Math.max(from + 1, Math.floor(first + (column + 1) * perColumn));
      sums.fill(0);
      const count = level.sum(row, from, to, sums);
      if (count) pixels.pile(column, sums, 255 * count);
    }
    pixels.endPiles();
  }

  drawPhase({ y, height }) {
    const { pixels } = this;
    const { history, fromNs, nsPerPx } = this.view;
    const { at, phase } = history.turns.columns;
    pixels.begin(LABEL_WIDTH, y, this.view.width, height);
    const nsPerColumn = nsPerPx / pixels.ratio;
    const end = fromNs + this.view.spanNs;
    const first = Math.max(0, history.turns.find(fromNs));
    for (let i = first; i < history.turns.length && at[i] < end; i++) {
      const until = i + 1 < history.turns.length ? at[i + 1] : this.view.nowNs();
      const look = LOOKS.indexOf(history.words.list[phase[i]]);
      pixels.stretch(look, (at[i] - fromNs) / nsPerColumn, (until - fromNs) / nsPerColumn);
    }
    pixels.endStretches(this.shift);
  }

  drawQueue({ y, height }) {
    const { context } = this;
    const { history } = this.view;
    const series = history.queue;
    const { at, length } = series.columns;
    const heights = new Float64Array(Math.ceil(this.view.width));
    const end = this.view.fromNs + this.view.spanNs;
    const isOld = series.forgotten && series.oldest() > this.view.fromNs;
    if (isOld || series.count(this.view.fromNs, end) > QUEUE_PER_PX * this.view.width) {
      const level = history.levelFor(this.view.nsPerPx, this.view.fromNs);
      for (let column = 0; column < heights.length; column++) {
        const from = Math.floor((this.view.fromNs + column * this.view.nsPerPx) / level.width);
        const to = Math.floor((this.view.fromNs + (column + 1) * this.view.nsPerPx) / level.width);
        heights[column] = level.longest(from, Math.max(to, from + 1));
      }
    } else {
      for (let i = Math.max(0, series.find(this.view.fromNs)); i < series.length && at[i] < end; i++) {
        const until = i + 1 < series.length ? at[i + 1] : this.view.nowNs();
        const x0 = Math.max(0, Math.floor((at[i] - this.view.fromNs) / this.view.nsPerPx));
        const x1 = Math.min(heights.length, Math.ceil((until - this.view.fromNs) / this.view.nsPerPx));
        for (let x = x0; x < x1; x++) heights[x] = Math.max(heights[x], length[i]);
      }
    }
    const most = Math.max(4, ...heights);
    context.fillStyle = coloursOf("waiting")[1];
    for (let x = 0; x < heights.length; x++) {
      const part = (height * heights[x]) / most;
      if (part) context.fillRect(LABEL_WIDTH + x, y + height - part, 1, part);
    }
    context.fillStyle = this.ink.line;
    context.fillRect(LABEL_WIDTH, y + height - 1, this.view.width, 1);
    const peak = Math.max(...heights);
    if (peak) {
      context.fillStyle = this.ink.quiet;
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "top";
      const text = `most ${peak}`;
      const left = LABEL_WIDTH + this.view.width - context.measureText(text).width - 4;
      context.clearRect(left - 2, y + 1, this.view.width, 12);
      context.fillText(text, left, y + 2);
    }
  }

  // Where cohorts begin, and where they are sealed: lines down through all lanes.
  drawTurns(height) {
    const { context } = this;
    const { history } = this.view;
    if (history.head.names) return;
    if (!history.turns.length) return;
    const { at, cohort, sealed } = history.turns.columns;
    const end = this.view.fromNs + this.view.spanNs;
    const first = Math.max(0, history.turns.find(this.view.fromNs));
    const lines = [];
    for (let i = first; i < history.turns.length && at[i] < end; i++) {
      const begins = i === 0 ? cohort[i] > 0 : cohort[i] !== cohort[i - 1];
      const seals = sealed[i] === 1 && (i === 0 || !sealed[i - 1] || cohort[i] !== cohort[i - 1]);
      const x = Math.round(this.view.toX(at[i]));
      const last = lines[lines.length - 1];
      if (!(begins || seals)) continue;
      if (last?.x === x) last.begins ||= begins;
      else lines.push({ x, begins, index: i });
    }
    if (lines.length > this.view.width / LINES_MIN) return this.cohortCount(first, end);
    // Where they stand close they only mark their own lane.
    const isDense = lines.length > this.view.width / LINE_SPACE;
    const bottom = isDense ? AXIS_HEIGHT + COHORT_HEIGHT : height;
    for (const { x, begins, index } of lines) {
      this.drawLine(x, bottom, begins);
      if (begins && !isDense) this.cohortName(cohort[index], index, x);
    }
    // The one that has begun before is named at the edge.
    const isNamed = at[first] >= this.view.fromNs || !cohort[first] || isDense;
    if (!isNamed) this.cohortName(cohort[first], first, LABEL_WIDTH);
  }

  cohortCount(first, end) {
    const { context } = this;
    const { turns } = this.view.history;
    const last = turns.find(end);
    const count = turns.columns.cohort[last] - turns.columns.cohort[first];
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = this.ink.quiet;
    const text = `${count.toLocaleString("en-US")} cohorts begin`;
    context.fillText(text, LABEL_WIDTH + 4, AXIS_HEIGHT + COHORT_HEIGHT / 2);
  }

  drawLine(x, bottom, begins) {
    const { context } = this;
    context.strokeStyle = this.ink.mark;
    context.globalAlpha = begins ? 0.75 : 0.6;
    context.setLineDash(begins ? [] : [3, 3]);
    context.beginPath();
    context.moveTo(x + 0.5, AXIS_HEIGHT);
    context.lineTo(x + 0.5, bottom);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  // Beside the line, if it fits before the next cohort.
  cohortName(cohort, index, x) {
    const { context } = this;
    const { history } = this.view;
    const { at, cohort: cohorts } = history.turns.columns;
    let next = index + 1;
    while (next < history.turns.length && cohorts[next] === cohort) next++;
    const until = next < history.turns.length ? at[next] : this.view.nowNs();
    context.font = "11px system-ui, sans-serif";
    const text = String(cohort);
    if (this.view.toX(until) - x < context.measureText(text).width + 8) return;
    context.textBaseline = "middle";
    context.fillStyle = this.ink.text;
    context.fillText(text, x + 4, AXIS_HEIGHT + COHORT_HEIGHT / 2);
  }

  // Requests that did not end as one would wish.
  drawEnds() {
    const { context } = this;
    const { history } = this.view;
    const { at, slot } = history.ends.columns;
    const end = this.view.fromNs + this.view.spanNs;
    const lanes = new Map(this.view.lanes.map((lane) => [lane.slot, lane]));
    context.strokeStyle = this.ink.mark;
    context.lineWidth = 1.5;
    let last = -Infinity;
    for (let i = history.ends.find(this.view.fromNs) + 1; i < history.ends.length && at[i] < end; i++) {
      const lane = lanes.get(slot[i]);
      const x = this.view.toX(at[i]);
      if (!lane || x - last < 0.5) continue;
      last = x;
      const [y, r] = [lane.y + lane.height / 2, Math.min(4, lane.height / 3)];
      context.beginPath();
      context.moveTo(x - r, y - r);
      context.lineTo(x + r, y + r);
      context.moveTo(x - r, y + r);
      context.lineTo(x + r, y - r);
      context.stroke();
    }
    context.lineWidth = 1;
  }

  drawGaps(height) {
    for (const [from, to] of this.view.history.gaps) {
      const [x0, x1] = [Math.max(LABEL_WIDTH, this.view.toX(from)), this.view.toX(to)];
      if (x1 < LABEL_WIDTH || x0 > this.view.width + LABEL_WIDTH) continue;
      this.context.fillStyle = coloursOf("unknown")[1];
      this.context.fillRect(x0, AXIS_HEIGHT, Math.max(1, x1 - x0), height - AXIS_HEIGHT);
    }
  }

  drawAxis(height) {
    const { context } = this;
    const { history } = this.view;
    const step = niceStep(this.view.nsPerPx * 90);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const end = Math.min(this.view.nowNs(), this.view.fromNs + this.view.spanNs);
    const first = Math.max(this.view.fromNs, history.startNs);
    for (let at = Math.ceil(first / step) * step; at <= end; at += step) {
      const x = Math.round(this.view.toX(at)) + 0.5;
      context.fillStyle = this.ink.quiet;
      context.fillText(axisText(at, step), x + 3, AXIS_HEIGHT / 2);
      context.strokeStyle = this.ink.line;
      context.globalAlpha = 0.6;
      context.beginPath();
      context.moveTo(x, 4);
      context.lineTo(x, height);
      context.stroke();
      context.globalAlpha = 1;
    }
  }

  drawCursor() {
    if (!this.view.cursor) return;
    const { context } = this;
    const lane = this.view.lanes[this.view.cursor.lane];
    if (!lane) return;
    const shown = this.view.describe(this.view.cursor.lane, this.view.cursor.at);
    const [from, to] = shown ? [shown.from, shown.to] : [this.view.cursor.at, this.view.cursor.at];
    const x0 = Math.max(LABEL_WIDTH + 1, this.view.toX(from));
    const x1 = Math.min(LABEL_WIDTH + this.view.width - 1, Math.max(x0 + 3, this.view.toX(to)));
    context.strokeStyle = this.ink.text;
    context.lineWidth = 2;
    context.strokeRect(x0, lane.y, x1 - x0, lane.height);
    context.lineWidth = 1;
  }

  drawLabels() {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = this.ink.quiet;
    for (const lane of this.view.lanes) {
      if (lane.height >= 12 || lane.slot % 8 === 0) {
        context.fillText(lane.name, 2, lane.y + lane.height / 2);
      }
    }
  }
}
