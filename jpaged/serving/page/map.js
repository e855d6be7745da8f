/** The pool as a canvas: a cell for each block, and on top of it flashes of what happens. */

import { colours, css, mix, ownerIndex } from "./colours.js";

const LEAST_CELL = 2; // CSS pixels
const MOST_CELL = 26;
const PLAIN = 5; // device pixels; smaller cells have one colour each
const MOST_PIXELS = 16e6; // what every browser can draw on
const FLASH = 1100; // milliseconds
const MOST_FLASHES = 300;
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** Paints one kind of cell into pixels. `size` includes the gap to its neighbours; a plain one is of one colour. */
function paint(pixels, stride, x, y, size, gap, plain, kind, fill, palette, odd) {
  const inner = size - gap;
  const { ink, cached, empty, back } = palette;
  const base = { owned: fill, shared: plain ? ink : fill, cached, empty }[kind];
  const core = Math.max(1, Math.round(inner * 0.4));
  const start = (inner - core) >> 1;
  const ring = inner >= 14 ? 2 : 1;
  for (let dy = 0; dy < size; dy++) {
    let at = (y + dy) * stride + x;
    for (let dx = 0; dx < size; dx++, at++) {
      let colour = base[odd];
      if (dx >= inner || dy >= inner) colour = back;
      else if (inner >= 9 && (dx === 0 || dx === inner - 1) && (dy === 0 || dy === inner - 1)) colour = back;
      else if (plain) colour = base[odd];
      else if (kind === "shared" && dx >= start && dx < start + core && dy >= start && dy < start + core) colour = ink[odd];
      else if (kind === "cached" && dx >= ring && dy >= ring && dx < inner - ring && dy < inner - ring) colour = empty[0];
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
  return {
    owners: theme.owners.map(pair), ink: pair(theme.ink), cached: pair(theme.cached), empty: pair(theme.empty), back: word(card),
  };
}

export class PoolMap {
  /** `onPoint(block, x, y)` is told which block is pointed at, or null; `onLayout()` that the cells have another size. */
  constructor(element, pool, onPoint, onLayout) {
    this.element = element;
    this.pool = pool;
    this.onPoint = onPoint;
    this.onLayout = onLayout;
    [this.cells, this.overlay] = element.querySelectorAll("canvas");
    this.highlighted = null; // a request's number
    this.pointed = null;
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

  /** Fits the cells to the width; to be called when the width, the theme or the number of blocks has changed. */
  layout() {
    const width = this.element.clientWidth, n = this.pool.numBlocks;
    if (!width || !n) return;
    const target = Math.min(310, Math.max(230, width * 0.36));
    const fitting = Math.sqrt((width * target) / n);
    const cell = Math.min(MOST_CELL, Math.max(LEAST_CELL, fitting));
    const scale = Math.min(window.devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / n) / cell);
    this.size = Math.max(1, Math.floor(cell * scale + 1e-6));
    this.gap = this.size >= 12 ? Math.max(2, Math.round(this.size / 9)) : this.size >= 3 ? 1 : 0;
    this.plain = this.size - this.gap < PLAIN;
    this.columns = Math.floor((width * scale) / this.size);
    this.rows = Math.ceil(n / this.columns);
    this.scale = scale;
    for (const canvas of [this.cells, this.overlay]) {
      canvas.width = this.columns * this.size;
      canvas.height = this.rows * this.size;
      canvas.style.width = `${canvas.width / scale}px`;
      canvas.style.height = `${canvas.height / scale}px`;
    }
    this.image = new ImageData(this.cells.width, this.cells.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.retheme();
    this.onLayout();
  }

  retheme() {
    this.theme = colours();
    const touching = this.gap === 0;
    this.vivid = words(this.theme, { touching, faded: false });
    this.faded = words(this.theme, { touching, faded: true });
    this.draw(null);
  }

  /** Draws the blocks that changed, or all for null. */
  draw(changed) {
    if (!this.size) return;
    if (changed === null || this.highlighted !== null) {
      this.pixels.fill(this.vivid.back);
      this.marked = this.highlighted === null ? null : this.pool.blocksOf(this.highlighted);
      for (let i = 0; i < this.pool.numBlocks; i++) this.#paint(i);
      this.cells.getContext("2d").putImageData(this.image, 0, 0);
    } else if (changed.length) {
      let first = Infinity, last = 0;
      for (const i of changed) {
        this.#paint(i);
        const row = Math.floor(i / this.columns);
        first = Math.min(first, row);
        last = Math.max(last, row);
      }
      const top = first * this.size, height = (last - first + 1) * this.size;
      this.cells.getContext("2d").putImageData(this.image, 0, 0, 0, top, this.image.width, height);
    }
    this.#animate();
  }

  /** Shows one request's blocks and fades the others; null shows all. */
  highlight(number) {
    if (number === this.highlighted) return;
    this.highlighted = number;
    this.marked = null;
    this.draw(null);
  }

  /** Marks blocks for a moment. `from`: of a copy, where it comes from. */
  flash(blocks, name, from = null) {
    const start = performance.now();
    for (const block of blocks) this.flashes.push({ block, name, from, start });
    this.flashes.splice(0, this.flashes.length - MOST_FLASHES);
    this.#animate();
  }

  #paint(i) {
    const [x, y] = this.#corner(i);
    const palette = this.marked && !this.marked.has(i) ? this.faded : this.vivid;
    const number = this.marked?.has(i) ? this.highlighted : this.pool.owners[i];
    const fill = number ? palette.owners[ownerIndex(number)] : palette.cached;
    const odd = ((i % this.columns) + Math.floor(i / this.columns)) & 1;
    paint(this.pixels, this.image.width, x, y, this.size, this.gap, this.plain, this.pool.kind(i), fill, palette, odd);
  }

  #corner(i) {
    return [(i % this.columns) * this.size, Math.floor(i / this.columns) * this.size];
  }

  #at(event) {
    const box = this.cells.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) * this.scale) / this.size);
    const y = Math.floor(((event.clientY - box.top) * this.scale) / this.size);
    const block = y * this.columns + x;
    return x >= 0 && x < this.columns && y >= 0 && block < this.pool.numBlocks ? block : null;
  }

  #point(block, event) {
    this.pointed = block;
    if (block === null) this.onPoint(null);
    else {
      const box = this.cells.getBoundingClientRect(), [x, y] = this.#corner(block);
      const middle = this.size / 2;
      this.onPoint(block, event?.clientX ?? box.left + (x + middle) / this.scale, event?.clientY ?? box.top + (y + middle) / this.scale);
    }
    this.#animate();
  }

  #move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key === "Escape") return this.#point(null);
    if (!(event.key in steps) || !this.size) return;
    event.preventDefault();
    const next = this.pointed === null ? 0 : this.pointed + steps[event.key];
    if (next >= 0 && next < this.pool.numBlocks) this.#point(next);
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
    this.flashes = this.flashes.filter((flash) => now - flash.start < FLASH && flash.block < this.pool.numBlocks);
    for (const flash of this.flashes) this.#flash(context, flash, Math.max(0, (now - flash.start) / FLASH));
    if (this.pointed !== null && this.size) this.#frame(context, this.pointed, css(this.theme.text), 2);
    if (this.flashes.length) this.#animate();
  }

  #flash(context, { block, name, from }, progress) {
    const colour = css(this.theme[name], still.matches ? 0.9 : 1 - progress);
    this.#frame(context, block, colour, 2);
    if (from === null || from >= this.pool.numBlocks) return;
    this.#frame(context, from, colour, 2);
    const middle = (this.size - this.gap) / 2;
    const [x0, y0] = this.#corner(from).map((v) => v + middle), [x1, y1] = this.#corner(block).map((v) => v + middle);
    context.strokeStyle = colour;
    context.lineWidth = 1.5 * this.scale;
    context.beginPath();
    context.moveTo(x0, y0);
    context.quadraticCurveTo((x0 + x1) / 2, Math.min(y0, y1) - 12 * this.scale, x1, y1);
    context.stroke();
  }

  #frame(context, block, colour, width) {
    const [x, y] = this.#corner(block), inner = this.size - this.gap;
    const line = Math.max(1, Math.min(width * this.scale, inner / 10));
    context.strokeStyle = colour;
    context.lineWidth = line;
    const edge = Math.max(0, Math.min(line / 2, inner / 4)); // along the cell's own edge, or around one too small for that
    const [from, side] = inner > 3 * line ? [edge, inner - 2 * edge] : [-edge, inner + 2 * edge];
    context.strokeRect(x + from, y + from, side, side);
  }
}

/** Draws one cell for the legend, plain if those of the map are. */
export function swatch(canvas, kind, theme, plain) {
  const scale = window.devicePixelRatio || 1, size = Math.round(14 * scale);
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size), palette = words(theme, { touching: false, faded: false });
  paint(new Uint32Array(image.data.buffer), size, 0, 0, size, 0, plain, kind, palette.owners[2], palette, 0);
  canvas.getContext("2d").putImageData(image, 0, 0);
}
