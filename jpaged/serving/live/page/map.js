/** The pool as a canvas: a cell for each block, and on top of it flashes of what happens. */

import { colours, css, mix, ownerIndex } from "./colours.js";
import { View } from "./view.js";

const PLAIN = 5; // device pixels; smaller cells have one colour each
const MOST_PIXELS = 16e6; // what every browser can draw on
const FLASH = 1100; // milliseconds
const ARROW = 2600; // milliseconds that the arrow of a copy stays
const GROWTH = 300; // milliseconds in which an arrow grows to its full length
const MOST_FLASHES = 300;
const FAINT = 0.4; // towards the card's colour: the edge of a cached block
const PALE = 0.75; // towards the card's colour: the part of a block without tokens
const TRACE = 0.85; // towards an empty block's colour: the inside of a cached block
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** Paint one cell into pixels.
 *
 * `cell`: its kind, the colours of its `owner` if it has or had one, and the share of its tokens that is `filled`.
 * `size`: device pixels with the gap to the neighbours. A plain cell has one colour.
 */
function paint(pixels, stride, x, y, size, gap, plain, { kind, owner, filled = 1 }, palette, odd) {
  const inner = size - gap;
  const { ink, cached, empty, back } = palette;
  const held = kind === "owned" || kind === "shared";
  const edge = held ? (plain && kind === "shared" ? ink : owner?.full ?? ink) : { cached: plain ? cached : owner?.faint ?? cached, empty, fold: back }[kind];
  const core = Math.max(1, Math.round(inner * 0.4));
  const start = (inner - core) >> 1;
  const ring = Math.max(1, Math.round(inner / 10));
  const level = inner - ring - Math.round((inner - 2 * ring) * filled); // the tokens stand in the cell like water
  const dots = [0.2, 0.5, 0.8].map((share) => Math.round(share * inner - 0.5));
  for (let dy = 0; dy < size; dy++) {
    let at = (y + dy) * stride + x;
    for (let dx = 0; dx < size; dx++, at++) {
      const inside = dx >= ring && dy >= ring && dx < inner - ring && dy < inner - ring;
      let colour = edge[odd];
      if (dx >= inner || dy >= inner) colour = back[0];
      else if (inner >= 9 && (dx === 0 || dx === inner - 1) && (dy === 0 || dy === inner - 1)) colour = back[0];
      else if (kind === "fold" && [dy, dx].every((v, axis) => dots.some((dot, i) => (axis || i === 1) && 12 * Math.abs(v - dot) <= inner))) colour = cached[0];
      else if (plain) colour = edge[odd];
      else if (kind === "shared" && dx >= start && dx < start + core && dy >= start && dy < start + core) colour = ink[odd];
      else if (kind === "cached" && inside) colour = (owner?.trace ?? empty)[0];
      else if (held && inside && dy < level) colour = (owner?.pale ?? ink)[0];
      pixels[at] = colour;
    }
  }
}

const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
const word = ([r, g, b]) => (little ? (255 << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | 255) >>> 0;

/** The theme's colours as words, each for even and for odd cells: where cells touch, these differ a little. */
function words(theme, { touching, faded }) {
  const card = theme.card;
  const pair = (colour) => {
    const shown = faded ? mix(colour, card, 0.82) : colour;
    return [word(shown), word(touching ? mix(shown, card, 0.14) : shown)];
  };
  const owners = theme.owners.map((colour) => ({
    full: pair(colour), faint: pair(mix(colour, card, FAINT)), pale: pair(mix(colour, card, PALE)),
    trace: pair(mix(colour, theme.empty, TRACE)),
  }));
  return { owners, ink: pair(theme.ink), cached: pair(theme.cached), empty: pair(theme.empty), back: pair(card) };
}

export class PoolMap {
  /** `onPoint(place, x, y)` is told which place of the map is pointed at, or null; `onLayout()` of each new layout. */
  constructor(element, pool, onPoint, onLayout) {
    this.element = element;
    this.pool = pool;
    this.view = new View(pool);
    this.onPoint = onPoint;
    this.onLayout = onLayout;
    [this.cells, this.overlay] = element.querySelectorAll("canvas");
    this.highlighted = null; // a request's number
    this.pointed = null; // a place
    this.flashes = [];
    this.size = 0; // of a cell with its gap, in pixels of the canvas; 0 before there are any
    this.plain = false;
    new ResizeObserver(() => this.layout()).observe(element);
    element.addEventListener("pointermove", (event) => this.#point(this.#at(event), event));
    element.addEventListener("pointerdown", (event) => this.#point(this.#at(event), event));
    element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.#point(null));
    element.addEventListener("blur", () => this.#point(null));
    element.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Fit the cells to the width and the pool. */
  layout() {
    const width = this.element.clientWidth, now = performance.now(), { view } = this;
    if (!width || !this.pool.numBlocks) return;
    if (this.pointed !== null) this.#point(null); // another block will have its place
    view.resize(width, Math.min(310, Math.max(230, width * 0.36)));
    view.notice(null, now);
    view.fit(now);
    this.scale = Math.min(window.devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / view.order.length) / view.cell);
    this.size = Math.max(1, Math.floor(view.cell * this.scale + 1e-6));
    this.gap = this.size >= 12 ? Math.max(2, Math.round(this.size / 10)) : this.size >= 3 ? 1 : 0;
    this.plain = this.size - this.gap < PLAIN;
    for (const canvas of [this.cells, this.overlay]) {
      canvas.width = view.columns * this.size;
      canvas.height = Math.ceil(view.order.length / view.columns) * this.size;
      canvas.style.width = `${canvas.width / this.scale}px`;
      canvas.style.height = `${canvas.height / this.scale}px`;
    }
    this.element.style.minHeight = `${view.leastHeight}px`;
    this.image = new ImageData(this.cells.width, this.cells.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.retheme();
    this.onLayout();
  }

  /** Show the blocks of the newest frame. `changed`: the blocks that it changed, or null for perhaps all. */
  update(changed) {
    const before = this.view.cell;
    if (!this.view.notice(changed, performance.now())) return this.draw(changed);
    this.layout();
    if (before && !still.matches) this.#zoom(before / this.view.cell);
  }

  retheme() {
    this.theme = colours();
    const touching = this.gap === 0;
    this.vivid = words(this.theme, { touching, faded: false });
    this.faded = words(this.theme, { touching, faded: true });
    this.draw(null);
  }

  /** Draw the blocks that changed, or all for null. */
  draw(changed) {
    if (!this.size) return;
    const filling = this.pool.filling(), { order, place, columns } = this.view;
    const context = this.cells.getContext("2d");
    if (changed === null || this.highlighted !== null) {
      this.pixels.fill(this.vivid.back[0]);
      this.marked = this.highlighted === null ? null : this.pool.blocksOf(this.highlighted);
      for (let at = 0; at < order.length; at++) this.#paint(at, filling);
      context.putImageData(this.image, 0, 0);
    } else {
      let first = Infinity, last = -1;
      for (const block of [...changed, ...(this.filling?.keys() ?? []), ...filling.keys()]) {
        if (this.view.isFolded(block)) continue;
        this.#paint(place[block], filling);
        const row = Math.floor(place[block] / columns);
        first = Math.min(first, row);
        last = Math.max(last, row);
      }
      const height = (last - first + 1) * this.size;
      if (last >= 0) context.putImageData(this.image, 0, 0, 0, first * this.size, this.image.width, height);
    }
    this.filling = filling;
    this.#animate();
  }

  /** Shows one request's blocks and fades the others; null shows all. */
  highlight(number) {
    if (number === this.highlighted) return;
    this.highlighted = number;
    this.marked = null;
    this.draw(null);
  }

  /** Mark blocks for a moment. `from`: the source of a copy, from which an arrow leads to each block. */
  flash(blocks, name, from = null) {
    const start = performance.now();
    for (const block of blocks) this.flashes.push({ block, name, from, start, life: from === null ? FLASH : ARROW });
    this.flashes.splice(0, this.flashes.length - MOST_FLASHES);
    this.#animate();
  }

  #paint(at, filling) {
    const block = this.view.order[at], [x, y] = this.#corner(at);
    const palette = this.marked && !this.marked.has(block) ? this.faded : this.vivid;
    const odd = ((at % this.view.columns) + Math.floor(at / this.view.columns)) & 1;
    paint(this.pixels, this.image.width, x, y, this.size, this.gap, this.plain, this.#cell(block, palette, filling), palette, odd);
  }

  #cell(block, palette, filling) {
    if (block < 0) return { kind: "fold" };
    const number = this.marked?.has(block) ? this.highlighted : this.pool.owners[block] || this.pool.writers[block];
    return { kind: this.pool.kind(block), owner: number ? palette.owners[ownerIndex(number)] : null, filled: filling.get(block) };
  }

  /** The corner of a place, in pixels of the canvas. */
  #corner(at) {
    return [(at % this.view.columns) * this.size, Math.floor(at / this.view.columns) * this.size];
  }

  #at(event) {
    const box = this.cells.getBoundingClientRect(), { columns, order } = this.view;
    const x = Math.floor(((event.clientX - box.left) * this.scale) / this.size);
    const y = Math.floor(((event.clientY - box.top) * this.scale) / this.size);
    const at = y * columns + x;
    return x >= 0 && x < columns && y >= 0 && at < order.length ? at : null;
  }

  #point(at, event) {
    this.pointed = at;
    if (at === null) this.onPoint(null);
    else {
      const box = this.cells.getBoundingClientRect(), [x, y] = this.#corner(at);
      const middle = this.size / 2;
      this.onPoint(at, event?.clientX ?? box.left + (x + middle) / this.scale, event?.clientY ?? box.top + (y + middle) / this.scale);
    }
    this.#animate();
  }

  #move(event) {
    const { columns, order } = this.view;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key === "Escape") return this.#point(null);
    if (!(event.key in steps) || !this.size) return;
    event.preventDefault();
    const next = this.pointed === null ? 0 : this.pointed + steps[event.key];
    if (next >= 0 && next < order.length) this.#point(next);
  }

  #zoom(ratio) {
    const from = ratio === 1 ? { opacity: 0.3 } : { opacity: 0.3, transform: `scale(${ratio})`, transformOrigin: "0 0" };
    this.cells.animate([from, { opacity: 1, transform: "none", transformOrigin: "0 0" }], { duration: 350, easing: "ease-out" });
  }

  #animate() {
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      this.#overlay(now);
    });
  }

  #overlay(now) {
    const context = this.overlay.getContext("2d");
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    const known = ({ block, from }) => block < this.pool.numBlocks && (from ?? 0) < this.pool.numBlocks;
    this.flashes = this.flashes.filter((flash) => now - flash.start < flash.life && known(flash));
    for (const flash of this.flashes) this.#flash(context, flash, Math.max(0, now - flash.start));
    if (this.pointed !== null && this.size) this.#frame(context, this.pointed, css(this.theme.text));
    if (this.flashes.length) this.#animate();
  }

  #flash(context, { block, name, from, life }, age) {
    const strength = still.matches ? 0.9 : from === null ? 1 - age / life : Math.min(1, (4 * (life - age)) / life);
    const colour = css(this.theme[name], strength), { place } = this.view;
    this.#frame(context, place[block], colour);
    if (from === null) return;
    this.#frame(context, place[from], colour);
    this.#arrow(context, place[from], place[block], colour, css(this.theme.card, strength), still.matches ? 1 : Math.min(1, age / GROWTH));
  }

  /** Draw the arc of an arrow from one place to another as far as it has `grown`, with a halo that sets it off. */
  #arrow(context, from, to, colour, halo, grown) {
    const middle = (this.size - this.gap) / 2;
    const [x0, y0] = this.#corner(from).map((v) => v + middle), [x1, y1] = this.#corner(to).map((v) => v + middle);
    const distance = Math.hypot(x1 - x0, y1 - y0) || 1;
    const lift = Math.min(0.3 * distance, 60 * this.scale) + 0.5 * this.size; // of the control point; the arc rises half as far
    const side = x1 < x0 ? -1 : 1, across = [(side * (y1 - y0)) / distance, (side * (x0 - x1)) / distance]; // upwards
    const up = (y0 + y1) / 2 + across[1] * lift > 0 ? 1 : -1;
    const cx = (x0 + x1) / 2 + 2 * up * across[0] * lift, cy = (y0 + y1) / 2 + 2 * up * across[1] * lift;
    const at = (t) => [x0, y0].map((start, i) => (1 - t) ** 2 * start + 2 * t * (1 - t) * [cx, cy][i] + t ** 2 * [x1, y1][i]);
    const steps = 24, points = Array.from({ length: steps + 1 }, (_, i) => at((i / steps) * grown));
    const [tip, before] = [at(grown), at(Math.max(0, grown - 0.05))];
    const angle = Math.atan2(tip[1] - before[1], tip[0] - before[0]), head = Math.max(7 * this.scale, 0.25 * this.size);
    const barb = (turn) => [tip[0] - head * Math.cos(angle + turn), tip[1] - head * Math.sin(angle + turn)];
    context.lineCap = context.lineJoin = "round";
    for (const [style, width] of [[halo, 6], [colour, 2.5]]) {
      context.beginPath();
      for (const [i, point] of points.entries()) context[i ? "lineTo" : "moveTo"](...point);
      context.moveTo(...barb(0.5));
      context.lineTo(...tip);
      context.lineTo(...barb(-0.5));
      context.strokeStyle = style;
      context.lineWidth = width * this.scale;
      context.stroke();
    }
  }

  #frame(context, at, colour) {
    const [x, y] = this.#corner(at), inner = this.size - this.gap;
    const line = Math.max(1, Math.min(2 * this.scale, inner / 10));
    context.strokeStyle = colour;
    context.lineWidth = line;
    const edge = Math.max(0, Math.min(line / 2, inner / 4)); // along the cell's own edge, or around one too small for that
    const [from, side] = inner > 3 * line ? [edge, inner - 2 * edge] : [-edge, inner + 2 * edge];
    context.strokeRect(x + from, y + from, side, side);
  }
}

/** Draw one cell for the legend, plain if the cells of the map are. */
export function swatch(canvas, kind, theme, plain) {
  const scale = window.devicePixelRatio || 1, size = Math.round(14 * scale);
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size), palette = words(theme, { touching: false, faded: false });
  const cell = { kind, owner: palette.owners[2], filled: 1 };
  paint(new Uint32Array(image.data.buffer), size, 0, 0, size, 0, plain, cell, palette, 0);
  canvas.getContext("2d").putImageData(image, 0, 0);
}
