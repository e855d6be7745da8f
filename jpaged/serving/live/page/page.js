/** Puts the page together: the feed moves everything else. */

import { KeyNeeded, request } from "./access.js";
import { Chat } from "./chat.js";
import { colours } from "./colours.js";
import { Log } from "./log.js";
import { PoolMap, swatch } from "./map.js";
import { History, Plot } from "./plots.js";
import { Pool } from "./pool.js";
import { events } from "./stream.js";
import { Tables } from "./tables.js";

const SILENCE = 15000; // milliseconds without a frame after which the connection is given up
const LONGEST_PAUSE = 5000; // before the next try

const get = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const duration = (seconds) => (seconds === null ? "–" : seconds < 10 ? `${count(1000 * seconds)} ms` : `${count(seconds)} s`);
const percent = (share) => (share === 0 || share >= 0.1 ? String(Math.round(100 * share)) : (100 * share).toFixed(1));

const pool = new Pool();
const map = new PoolMap(get("map"), pool, showTooltip, drawLegend);
const tables = new Tables(get("requests"), pool, (number) => map.highlight(number));
const log = new Log(get("events"));
const history = new History();
const plots = Object.fromEntries(["used", "rate", "latency", "hits"].map((name) => [name, new Plot(get(`plot-${name}`))]));
const chat = new Chat((number) => map.highlight(number));
window.jpaged = { pool, map, history, chat }; // for the curious: the state behind the drawings

// The feed

let connection = null;

async function follow() {
  connection = new AbortController();
  const { signal } = connection;
  const silence = () => setTimeout(() => connection.abort(), SILENCE);
  let timer = null;
  try {
    const response = await request("/live", { signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    timer = silence();
    for await (const data of events(response)) {
      clearTimeout(timer);
      timer = silence();
      const frame = JSON.parse(data);
      if (frame.dead) return "dead";
      await take(frame);
    }
    return "ended";
  } finally {
    clearTimeout(timer);
    connection.abort();
  }
}

async function keepFollowing() {
  for (let pause = 500; ; pause = Math.min(LONGEST_PAUSE, 2 * pause)) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    const before = pool.frame;
    try {
      const end = await follow();
      if (end === "dead") setStatus("dead", "the engine has stopped; the server's log says why");
      else setStatus("waiting", "reconnecting");
    } catch (error) {
      if (error instanceof KeyNeeded) {
        setStatus("waiting", "a key is needed");
        get("key").hidden = false;
        await new Promise((resolve) => get("key").addEventListener("click", resolve, { once: true }));
        get("key").hidden = true;
        continue;
      }
      if (get("status").dataset.state !== "dead") setStatus("waiting", "reconnecting");
    }
    if (pool.frame !== before) pause = 500;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function take(frame) {
  const held = new Map(); // what those had that are preempted by now
  for (const event of frame.events) if (event.kind === "preempt" && pool.facts) held.set(event.number, pool.blocksOf(event.number));
  map.update(await pool.apply(frame));
  const fresh = log.add(frame.events, frame);
  if (!frame.whole) for (const event of fresh) flash(event, held);
  history.add(frame);
  setStatus("live", `${count(frame.running)} running${frame.waiting ? `, ${count(frame.waiting)} waiting` : ""}`);
  schedule();
}

function flash(event, held) {
  if (event.kind === "copy") map.flash([event.destination], "text", event.source);
  if (event.kind === "preempt") map.flash(held.get(event.number), "text");
  if (event.kind === "hit" || event.kind === "fork") {
    const request = pool.facts.requests.find((one) => one.number === event.number);
    const tokens = event.kind === "hit" ? event.tokens : request?.prompt;
    if (request) map.flash(request.branches[0].table.slice(0, Math.ceil(tokens / pool.facts.block_size)), "accent");
  }
}

function setStatus(state, text) {
  get("status").dataset.state = state;
  if (get("status-text").textContent !== text) get("status-text").textContent = text;
}

document.addEventListener("visibilitychange", () => document.hidden && connection?.abort());

// What is drawn from a frame, at most once per picture of the screen

let scheduled = false;
let described = 0;

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    render(pool.facts);
  });
}

function render(facts) {
  tables.draw();
  const { totals } = facts;
  get("pool-size").textContent = `${count(facts.num_blocks)} blocks of ${facts.block_size} tokens`;
  get("block-size").textContent = facts.block_size;
  get("requests-count").textContent = facts.running ? `${count(facts.running)} running` : "";
  get("events-count").textContent = `${count(totals.copies)} copied, ${count(totals.preemptions)} preempted`;
  const kinds = pool.counts();
  for (const [kind, blocks] of Object.entries(kinds)) get(`count-${kind}`).textContent = count(blocks);
  const more = { "pinned": facts.pinned, "copied to the host": facts.on_host };
  get("cached-more").textContent = Object.entries(more).map(([words, blocks]) => (blocks ? `; ${count(blocks)} ${words}` : "")).join("");
  get("folded").textContent = foldedWords();
  get("saving").textContent = saving(facts, kinds);

  get("used").textContent = count(facts.used);
  get("used-unit").textContent = `of ${count(facts.num_blocks)}, ${percent(facts.used / facts.num_blocks)} %`;
  const last = history.frames.at(-1), latency = history.latest("latency"), first = history.latest("firstToken");
  get("rate").textContent = count(last.rate);
  get("rate-unit").textContent = `${count(totals.tokens)} in all`;
  get("latency").textContent = latency === null ? "–" : (1000 * latency).toFixed(latency < 0.01 ? 1 : 0);
  get("latency-unit").textContent = latency === null ? "ms" : `ms, first ${duration(first)}`;
  const share = totals.prefix_queries ? totals.prefix_hits / totals.prefix_queries : 0;
  get("hits").textContent = totals.prefix_queries ? percent(share) : "–";
  get("hits-unit").textContent = totals.prefix_queries ? `%, ${count(totals.prefix_hits)} tokens` : "%";

  const points = (value) => history.frames.map((frame) => ({ time: frame.time, value: value(frame) }));
  plots.used.draw(points((frame) => frame.used), facts.time, { floor: facts.num_blocks / 20 });
  plots.rate.draw(points((frame) => frame.rate), facts.time, { floor: 10 });
  plots.latency.draw(points((frame) => frame.latency), facts.time);
  const found = (frame) => (frame.totals.prefix_queries ? frame.totals.prefix_hits / frame.totals.prefix_queries : null);
  plots.hits.draw(points(found), facts.time, { top: 1 });
  if (facts.time - described > 5) {
    described = facts.time;
    get("map-summary").textContent = `${facts.used} of ${facts.num_blocks} blocks are in use by ${facts.running} requests.`;
  }
}

/** What paging saves at this moment. */
function saving(facts, kinds) {
  if (!facts.branches) return `Nothing runs.${kinds.cached ? " A text that begins like one in the cached blocks finds its beginning there." : ""}`;
  const reserved = facts.branches * facts.max_blocks, shared = facts.held - facts.used;
  const whole = `Without paging, ${count(reserved)} blocks would be reserved, enough for the longest text of each; ${count(facts.used)} are in use`;
  return shared > 0 ? `${whole}, ${count(shared)} fewer than without sharing.` : `${whole}.`;
}

// The tooltip of the map

function showTooltip(place, x, y) {
  const tooltip = get("tooltip");
  tooltip.hidden = place === null;
  if (place === null) return map.highlight(null);
  const block = map.view.order[place];
  map.highlight(pool.owners[block] || null);
  const lines = block < 0 ? describeFold(~block) : describe(block);
  tooltip.replaceChildren(...lines.map((text, i) => {
    const line = document.createElement(i ? "span" : "b");
    line.textContent = text;
    return line;
  }));
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, x + 14))}px`;
  tooltip.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
}

function describeFold(first) {
  const last = map.view.endOfFold(first);
  return [`Blocks ${count(first)} to ${count(last)}`, `${kindsIn(first, last)}, not drawn`];
}

/** How many blocks of a range are cached and how many are empty, in words. `test` chooses among the blocks. */
function kindsIn(first, last, test = () => true) {
  const found = { cached: 0, empty: 0 };
  for (let block = first; block <= last; block++) if (test(block)) found[pool.kind(block)] += 1;
  return Object.entries(found).filter(([, blocks]) => blocks).map(([kind, blocks]) => `${count(blocks)} ${kind}`).join(" and ");
}

function foldedWords() {
  const words = kindsIn(0, pool.numBlocks - 1, (block) => map.view.isFolded(block));
  return words && `⋯ ${words} blocks are folded away; the map grows as they are used.`;
}

function describe(block) {
  const size = pool.facts.block_size, references = pool.references(block), owner = pool.owners[block];
  const lines = [`Block ${count(block)}`];
  if (!references) lines.push(pool.isCached(block) ? "free, but remembers its tokens: a prompt that begins alike takes it back" : "free");
  for (const { request, branch, at } of pool.places(block).slice(0, 4)) {
    const whose = request.num_branches > 1 ? `#${request.number}, branch ${branch + 1}` : `#${request.number}`;
    lines.push(`${whose}: tokens ${at * size + 1} to ${(at + 1) * size}`);
  }
  if (references && lines.length === 1) lines.push(owner ? `held by #${owner}` : "held");
  if (references > 1) lines.push(`shared by ${references === 127 ? "127 or more" : references} tables, stored once`);
  if (references && pool.isCached(block)) lines.push("full, and in the prefix cache");
  return lines;
}

// Theme

const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  get("theme-name").textContent = name;
  get("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system has them" : name}`);
  retheme();
}

function retheme() {
  drawLegend();
  Object.values(plots).forEach((plot) => plot.retheme());
  tables.retheme();
  if (pool.numBlocks) map.retheme();
}

function drawLegend() {
  const theme = colours();
  for (const canvas of document.querySelectorAll(".swatch")) swatch(canvas, canvas.dataset.kind, theme, map.plain);
}

get("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(get("theme-name").textContent) + 1) % THEMES.length];
  localStorage.setItem("jpaged-theme", next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
setTheme(THEMES.includes(localStorage.getItem("jpaged-theme")) ? localStorage.getItem("jpaged-theme") : "auto");

// The model's name

async function showModel() {
  const response = await request("/v1/models");
  if (response.ok) get("model").textContent = (await response.json()).data[0].id;
}

showModel().catch(() => {}); // the feed says what is wrong
keepFollowing();
