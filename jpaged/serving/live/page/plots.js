/** Figures over the last minute: numbers, each with a small plot. */

import { colours, css } from "./colours.js";

const WINDOW = 60; // seconds shown
const SPAN = 1; // seconds that a rate is taken over

/** What the totals were at each frame, and what follows from two of them. */
export class History {
  frames = [];

  add(facts) {
    const last = this.frames.at(-1);
    if (last && (facts.time < last.time || facts.totals.tokens < last.totals.tokens)) this.frames = []; // another server
    const { time, used, totals } = facts;
    this.frames.push({ time, used, totals, ...this.#rates(time, totals) });
    while (this.frames[0].time < time - WINDOW - SPAN) this.frames.shift();
  }

  #rates(time, totals) {
    const before = this.frames.findLast((frame) => frame.time <= time - SPAN) ?? this.frames[0];
    if (!before) return { rate: 0, latency: null, firstToken: null };
    const change = (name) => totals[name] - before.totals[name];
    const mean = (sum, count) => (change(count) > 0 ? change(sum) / change(count) : null);
    return {
      rate: time > before.time ? change("tokens") / (time - before.time) : 0,
      latency: mean("token_seconds", "timed_tokens"),
      firstToken: mean("first_token_seconds", "first_tokens"),
    };
  }

  latest(name) {
    return this.frames.findLast((frame) => frame[name] !== null)?.[name] ?? null;
  }
}

/** A line over the last minute; values are numbers, or null for none. */
export class Plot {
  constructor(canvas) {
    this.canvas = canvas;
  }

  draw(points, now, { top = null, floor = 0 } = {}) {
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const theme = (this.theme ??= colours());
    const values = points.map((point) => point.value).filter((value) => value !== null);
    const most = top ?? Math.max(floor, ...values, 1e-9) * 1.1;
    const x = (time) => width - ((now - time) / WINDOW) * width;
    const y = (value) => height - 1.5 - (value / most) * (height - 4);
    context.strokeStyle = css(theme.quiet, 0.25);
    context.beginPath();
    context.moveTo(0, height - 0.5);
    context.lineTo(width, height - 0.5);
    context.stroke();
    let run = [];
    const finish = () => {
      if (run.length > 1) {
        context.beginPath();
        for (const [i, [px, py]] of run.entries()) context[i ? "lineTo" : "moveTo"](px, py);
        context.strokeStyle = css(theme.accent);
        context.lineWidth = 1.75;
        context.lineJoin = "round";
        context.stroke();
        context.lineTo(run.at(-1)[0], height);
        context.lineTo(run[0][0], height);
        context.fillStyle = css(theme.accent, 0.14);
        context.fill();
      }
      run = [];
    };
    for (const { time, value } of points) {
      if (value === null) finish();
      else run.push([x(time), y(value)]);
    }
    finish();
  }

  retheme() {
    this.theme = null;
  }
}
