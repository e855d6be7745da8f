/** The chat box: what is asked, and the answers as they stream in. */

import { ownerIndex } from "./colours.js";
import { post, request } from "./access.js";
import { events } from "./stream.js";

const FOUR = "Tell me a story about a fox.";
const EIGHT = ["a fox", "a dragon", "a robot", "a rabbit", "a king", "a bird", "a girl", "a dog"];
const EIGHT_SYSTEM = "You are a helpful, honest and kind assistant. You are a storyteller. Be kind and clear.";
const EIGHT_TURNS = 5;
const NO_TEMPLATE = /no chat template/;

/** The server's refusal, in its own words. */
class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the server answered ${status}`);
    this.param = body?.error?.param;
  }
}

export class Chat {
  history = []; // messages of the conversation so far
  hasTemplate = true;
  #running = new Set(); // AbortControllers

  /** `onHover(number)` is told whose blocks to show, or null. */
  constructor(onHover) {
    this.onHover = onHover;
    const get = (id) => document.getElementById(id);
    Object.assign(this, {
      messages: get("messages"), welcome: get("welcome"), notice: get("notice"), form: get("form"), prompt: get("prompt"),
      send: get("send"), stop: get("stop"), fresh: get("new-chat"), answers: get("answers"),
      temperature: get("temperature"), maxTokens: get("max-tokens"),
    });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.say(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    this.prompt.addEventListener("input", () => this.#fit());
    this.stop.addEventListener("click", () => this.#running.forEach((controller) => controller.abort()));
    this.fresh.addEventListener("click", () => this.clear());
    for (const chip of document.querySelectorAll("[data-prompt]")) {
      chip.addEventListener("click", () => this.say(chip.dataset.prompt));
    }
    get("four").addEventListener("click", () => this.say(this.prompt.value || FOUR, 4));
    get("options").open = matchMedia("(min-width: 901px)").matches;
    get("eight").addEventListener("click", () => this.sendEight());
  }

  clear() {
    this.#running.forEach((controller) => controller.abort());
    this.history = [];
    this.messages.replaceChildren(this.welcome);
    this.#tell("");
    this.fresh.hidden = true;
    this.prompt.focus();
  }

  /** Asks for one answer or several. */
  async say(text, count = Number(this.answers.value)) {
    text = text.trim();
    if (!text || this.#running.size) return;
    this.prompt.value = "";
    this.#fit();
    this.#begin();
    const mine = this.#add("message mine");
    mine.textContent = text;
    const group = this.#add(count > 1 ? "message answers" : "message");
    const views = Array.from({ length: count }, (_, i) => new Answer(group, count > 1 ? `answer ${i + 1}` : "", this.onHover));
    const messages = [...this.history, { role: "user", content: text }];
    await this.#ask(messages, count, views);
    if (!views.some((view) => view.text)) return;
    const reply = { role: "assistant", content: "" };
    this.history = [...messages, reply];
    this.#choose(views, views.find((view) => view.text), reply);
    if (count > 1) this.#tell("The conversation goes on from the marked answer; click another one to take that.");
  }

  /** Eight chats side by side, each of several turns: every turn finds the one before it in the cache. */
  async sendEight() {
    if (this.#running.size) return;
    this.#begin();
    const mine = this.#add("message mine");
    mine.textContent = `Eight chats at once, ${EIGHT_TURNS} stories in each.`;
    const group = this.#add("message answers");
    await Promise.all(EIGHT.map((_, first) => this.#tellStories(first, new Answer(group, "", this.onHover))));
  }

  async #tellStories(first, view) {
    const messages = [{ role: "system", content: EIGHT_SYSTEM }];
    for (let turn = 0; turn < EIGHT_TURNS; turn++) {
      const who = EIGHT[(first + turn) % EIGHT.length];
      view.turn(who, `${turn + 1} of ${EIGHT_TURNS}`);
      messages.push({ role: "user", content: `Tell me a story about ${who}.` });
      if (!(await this.#ask(messages, 1, [view]))) return;
      messages.push({ role: "assistant", content: view.text });
    }
  }

  #choose(views, chosen, reply) {
    for (const view of views) {
      view.element.classList.toggle("chosen", views.length > 1 && view === chosen);
      if (views.length > 1) view.onChoose = () => this.#choose(views, view, reply);
    }
    reply.content = chosen.text;
  }

  /** Streams an answer into its views; returns whether it came to its end. */
  async #ask(messages, count, views) {
    const controller = new AbortController();
    this.#running.add(controller);
    this.#buttons();
    try {
      await this.#stream(messages, count, views, controller.signal);
      views.forEach((view) => view.end());
      return true;
    } catch (error) {
      const stopped = controller.signal.aborted;
      views.forEach((view) => view.end(stopped ? "stopped" : error.message, !stopped));
      return false;
    } finally {
      this.#running.delete(controller);
      this.#buttons();
    }
  }

  async #stream(messages, count, views, signal) {
    const temperature = this.temperature.valueAsNumber, most = this.maxTokens.valueAsNumber;
    const options = { stream: true, n: count, ...(temperature >= 0 ? { temperature } : {}), ...(most > 0 ? { max_tokens: most } : {}) };
    const response = await this.#open(messages, options, signal);
    let named = false, done = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(response.status, chunk);
      if (!named) this.#name(chunk.id, views);
      named = true;
      for (const choice of chunk.choices) {
        views[choice.index]?.add(choice.delta?.content ?? choice.text ?? "", choice.finish_reason);
      }
      this.#follow();
    }
    if (!done) throw new Error("the connection ended before the answer did");
  }

  /** A chat where the model has a template for one, else the bare text to be continued. */
  async #open(messages, options, signal) {
    if (this.hasTemplate) {
      try {
        return await accepted(await post("/v1/chat/completions", { messages, ...options }, signal));
      } catch (error) {
        if (!(error instanceof Refused && error.param === "messages" && NO_TEMPLATE.test(error.message))) throw error;
        this.hasTemplate = false;
        this.#tell("This model has no chat template: it continues your text as it stands.");
      }
    }
    return accepted(await post("/v1/completions", { prompt: messages.at(-1).content, ...options }, signal));
  }

  /** Asks which number an answer's request has on the map; only who has the answer's id can. */
  async #name(id, views) {
    try {
      const response = await request(`/live/requests/${encodeURIComponent(id)}-0`);
      if (response.ok) {
        const { number } = await response.json();
        views.forEach((view) => view.name(number));
      }
    } catch {
      // an answer without its number is still an answer
    }
  }

  #begin() {
    this.welcome.remove();
    this.#tell("");
    this.fresh.hidden = false;
  }

  #add(className) {
    const element = document.createElement("div");
    element.className = className;
    this.messages.append(element);
    this.messages.scrollTop = this.messages.scrollHeight;
    return element;
  }

  #tell(text) {
    this.notice.textContent = text;
    this.notice.hidden = !text;
  }

  #buttons() {
    const busy = this.#running.size > 0;
    const moved = busy ? document.activeElement === this.send : document.activeElement === this.stop;
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    if (moved) (busy ? this.stop : this.send).focus();
    for (const chip of document.querySelectorAll(".chip")) chip.disabled = busy;
  }

  #fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(160, this.prompt.scrollHeight + 2)}px`;
  }

  /** Keeps the end in view, unless the reader has scrolled up. */
  #follow() {
    const { scrollTop, scrollHeight, clientHeight } = this.messages;
    if (scrollHeight - scrollTop - clientHeight < 120) this.messages.scrollTop = scrollHeight;
  }
}

async function accepted(response) {
  if (response.ok) return response;
  throw new Refused(response.status, await response.json().catch(() => null));
}

/** One answer as it grows. */
class Answer {
  text = "";
  onChoose = null;
  #begun = performance.now();

  constructor(parent, title, onHover) {
    this.element = document.createElement("div");
    this.element.className = "answer busy";
    this.head = document.createElement("p");
    this.head.className = "about";
    this.tag = document.createElement("button");
    this.tag.type = "button";
    this.tag.hidden = true;
    this.title = document.createElement("span");
    this.title.textContent = title;
    this.note = document.createElement("span");
    this.note.className = "note";
    this.head.append(this.tag, this.title, this.note);
    this.body = document.createElement("p");
    this.body.className = "text";
    this.element.append(this.head, this.body);
    parent.append(this.element);
    this.element.addEventListener("click", (event) => event.target !== this.tag && this.onChoose?.());
    for (const name of ["pointerenter", "focus"]) this.tag.addEventListener(name, () => onHover(this.number));
    for (const name of ["pointerleave", "blur"]) this.tag.addEventListener(name, () => onHover(null));
  }

  /** Begins the next answer in the same place. */
  turn(title, note) {
    this.text = "";
    this.title.textContent = title;
    this.note.textContent = note;
    this.finishReason = null;
    this.element.classList.add("busy");
  }

  name(number) {
    this.number = number;
    this.tag.className = `tag owner-${ownerIndex(number)}`;
    this.tag.textContent = `#${number}`;
    this.tag.setAttribute("aria-label", `Request ${number}: show its blocks on the map`);
    this.tag.hidden = false;
  }

  add(text, finishReason) {
    this.text += text;
    this.body.textContent = this.text;
    this.body.scrollTop = this.body.scrollHeight;
    if (finishReason) this.finishReason = finishReason;
  }

  end(note = null, failed = false) {
    this.element.classList.remove("busy");
    this.element.classList.toggle("failed", failed);
    const seconds = (performance.now() - this.#begun) / 1000;
    const cut = this.finishReason === "length" ? ", cut at max tokens" : "";
    if (failed) this.body.textContent = `${this.text}${this.text ? "\n" : ""}${note}`;
    this.note.textContent = failed ? "failed" : note ?? `${seconds.toFixed(1)} s${cut}`;
  }
}
