/** The running requests, each with its block tables as strips. */

import { colours, css, mix, ownerIndex } from "./colours.js";

const CELL = 14;
const GAP = 2;
const BAR = 3; // under the blocks that a prefix hit brought
const LINGER = 3000; // milliseconds that a request stays after its end

export class Tables {
  /** `onHover(number)` is told which request is pointed at, or null. */
  constructor(element, pool, onHover) {
    this.element = element;
    this.pool = pool;
    this.onHover = onHover;
    this.rows = new Map(); // by number
    this.theme = colours();
    this.empty = document.createElement("p");
    this.empty.className = "quiet none";
    this.empty.textContent = "Nothing runs. The pool waits, and remembers.";
    this.queue = document.createElement("p");
    this.queue.className = "quiet queue";
    element.append(this.empty, this.queue);
    new ResizeObserver(() => this.draw()).observe(element);
  }

  retheme() {
    this.theme = colours();
    this.draw();
  }

  draw() {
    const facts = this.pool.facts;
    if (!facts) return;
    const listed = new Set();
    let before = null;
    for (const request of facts.requests) {
      listed.add(request.number);
      const row = this.rows.get(request.number) ?? this.#add(request.number);
      const place = before ? before.nextSibling : this.element.firstChild;
      if (place !== row.element) this.element.insertBefore(row.element, place);
      before = row.element;
      this.#fill(row, request, facts.block_size);
    }
    for (const [number, row] of this.rows) {
      if (listed.has(number)) continue;
      row.element.classList.add("over");
      row.gone ??= performance.now();
      if (performance.now() - row.gone > LINGER) {
        row.element.remove();
        this.rows.delete(number);
      }
    }
    this.empty.hidden = this.rows.size > 0;
    this.#queue(facts);
  }

  #queue(facts) {
    const more = facts.running - facts.requests.length;
    const waiting = facts.queue.slice(0, 8).map((request) => `#${request.number}`).join(" ");
    const rest = facts.waiting - Math.min(8, facts.queue.length);
    const parts = [];
    if (more > 0) parts.push(`and ${more.toLocaleString("en")} more running`);
    if (facts.waiting) parts.push(`waiting for blocks or a turn: ${waiting}${rest > 0 ? ` and ${rest.toLocaleString("en")} more` : ""}`);
    this.queue.textContent = parts.join("; ");
    this.queue.hidden = !parts.length;
  }

  #add(number) {
    const element = document.createElement("article");
    element.className = "request";
    element.tabIndex = 0;
    const head = document.createElement("p");
    const tag = document.createElement("span");
    tag.className = `tag owner-${ownerIndex(number)}`;
    tag.textContent = `#${number}`;
    const words = document.createElement("span");
    words.className = "words";
    head.append(tag, words);
    const canvas = document.createElement("canvas");
    element.append(head, canvas);
    for (const name of ["pointerenter", "focus"]) element.addEventListener(name, () => this.onHover(number));
    for (const name of ["pointerleave", "blur"]) element.addEventListener(name, () => this.onHover(null));
    const row = { element, words, canvas, gone: null };
    this.rows.set(number, row);
    return row;
  }

  #fill(row, request, blockSize) {
    row.gone = null;
    row.element.classList.remove("over");
    const output = request.branches.map((branch) => Math.max(0, branch.tokens - request.prompt));
    const made = output.length > 1 ? `${request.num_branches} branches, ${Math.max(...output)} tokens each` : `${output[0] ?? 0} tokens of answer`;
    const found = request.cached ? ` (${request.cached} found in the cache)` : "";
    const text = `${request.prompt} of prompt${found}, ${made}`;
    if (row.words.textContent !== text) row.words.textContent = text;
    row.canvas.setAttribute("role", "img");
    row.canvas.setAttribute("aria-label", `Block table: ${request.branches.map((b) => b.blocks).join(", ")} blocks`);
    this.#strips(row.canvas, request, blockSize);
  }

  #strips(canvas, request, blockSize) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(120, this.element.clientWidth - 30);
    const perLine = Math.floor((width - 30) / (CELL + GAP));
    const shown = request.branches.map((branch) => branch.table.slice(0, 2 * perLine));
    const lines = shown.map((table) => Math.max(1, Math.ceil(table.length / perLine)));
    const step = CELL + BAR + 3;
    const height = lines.reduce((a, b) => a + b, 0) * step;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colour = this.theme.owners[ownerIndex(request.number)];
    const hit = Math.floor(request.cached / blockSize);
    let top = 0;
    request.branches.forEach((branch, b) => {
      shown[b].forEach((block, i) => {
        const x = (i % perLine) * (CELL + GAP), y = top + Math.floor(i / perLine) * step;
        const filled = Math.min(1, Math.max(0, (branch.computed - i * blockSize) / blockSize));
        context.fillStyle = css(mix(colour, this.theme.card, 0.72));
        context.fillRect(x, y, CELL, CELL);
        context.fillStyle = css(colour);
        context.fillRect(x, y, CELL * filled, CELL);
        if (this.pool.kind(block) === "shared") {
          context.fillStyle = css(this.theme.ink);
          context.fillRect(x + CELL * 0.3, y + CELL * 0.3, CELL * 0.4, CELL * 0.4);
        }
        if (i < hit) {
          context.fillStyle = css(this.theme.quiet);
          context.fillRect(x, y + CELL + 1, CELL + (i + 1 < hit ? GAP : 0), BAR - 1);
        }
      });
      const rest = branch.blocks - shown[b].length;
      if (rest > 0) {
        context.fillStyle = css(this.theme.quiet);
        context.font = "11px sans-serif";
        const i = shown[b].length - 1;
        context.fillText(`+${rest}`, ((i % perLine) + 1) * (CELL + GAP), top + (lines[b] - 1) * step + 11);
      }
      top += lines[b] * step;
    });
  }
}
