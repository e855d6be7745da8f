/** The chat box: what is asked, and the answers as they stream in. */

import { ownerIndex } from "./colours.js";
import { post, request } from "./access.js";
import { Markdown } from "./markdown.js";
import { events } from "./stream.js";

// Long enough to fill a block or two, which all that begin with it share.
const SYSTEM = { role: "system", content: "You are a helpful, honest and kind assistant. You are a storyteller. Be kind and clear." };
const FOUR = "Tell me a story about a fox.";
const EIGHT = ["a fox", "a dragon", "a robot", "a rabbit", "a king", "a bird", "a girl", "a dog"];
const EIGHT_TURNS = 5;
const NO_TEMPLATE = /no chat template/;
const TOO_LONG = /max_model_len|maximum context length|KV pool can hold/i;

/** The server's refusal, in its own words. */
class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the server answered ${status}`);
    this.param = body?.error?.param;
    this.code = body?.error?.code;
  }

  /** Whether the prompt and its answer are longer than the model's context. */
  get isTooLong() {
    return this.code === "context_length_exceeded" || TOO_LONG.test(this.message);
  }
}

export class Chat {
  history = []; // messages of the conversation so far
  hasTemplate = true;
  #running = null; // the AbortController of what streams

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
    this.stop.addEventListener("click", () => this.#running?.abort());
    this.fresh.addEventListener("click", () => this.clear());
    for (const chip of document.querySelectorAll("[data-prompt]")) {
      chip.addEventListener("click", () => this.say(chip.dataset.prompt));
    }
    get("four").addEventListener("click", () => this.#four());
    get("options").open = matchMedia("(min-width: 901px)").matches;
    get("eight").addEventListener("click", () => this.sendEight());
  }

  clear() {
    this.#running?.abort();
    this.history = [];
    this.messages.replaceChildren(this.welcome);
    this.#tell("");
    this.fresh.hidden = true;
    this.prompt.focus();
  }

  #four() {
    if (!this.history.length && !this.#running) this.history = [SYSTEM];
    this.say(this.prompt.value || FOUR, 4);
  }

  /** Asks for one answer or several. */
  async say(text, count = Number(this.answers.value)) {
    text = text.trim();
    if (!text || this.#running) return;
    this.prompt.value = "";
    this.#fit();
    const titles = count > 1 ? Array.from({ length: count }, (_, i) => `answer ${i + 1}`) : [""];
    const { mine, views } = this.#begin(text, titles);
    const messages = [...this.history, { role: "user", content: text }];
    const error = await this.#ask((options) => this.#chat(messages, { n: count, ...options }), views, () => 0);
    if (this.history.length && error instanceof Refused && error.isTooLong) this.#offerNewChat(text);
    if (!mine.isConnected || !views.some((view) => view.text)) return;
    const reply = { role: "assistant", content: "" };
    this.history = [...messages, reply];
    this.#choose(views, views.find((view) => view.text), reply);
    if (count > 1) this.#tell("The conversation goes on from the marked answer; click another one to take that.");
  }

  /** Eight chats side by side, each of several turns: every turn finds the one before it in the cache. */
  async sendEight() {
    if (this.#running) return;
    const { mine, views } = this.#begin(`Eight chats at once, ${EIGHT_TURNS} stories in each.`, EIGHT);
    const chats = EIGHT.map(() => [SYSTEM]);
    for (let turn = 0; turn < EIGHT_TURNS && mine.isConnected; turn++) {
      chats.forEach((chat, i) => {
        const who = EIGHT[(i + turn) % EIGHT.length];
        views[i].turn(who, `${turn + 1} of ${EIGHT_TURNS}`);
        chat.push({ role: "user", content: `Tell me a story about ${who}.` });
      });
      if (await this.#ask((options) => this.#together(chats, options), views, (i) => i)) return;
      chats.forEach((chat, i) => chat.push({ role: "assistant", content: views[i].text }));
    }
  }

  #choose(views, chosen, reply) {
    for (const view of views) {
      if (views.length > 1) view.offer(view === chosen, () => this.#choose(views, view, reply));
    }
    reply.content = chosen.text;
  }

  /** Streams what `open(options)` gives, a choice into each view; `place(i)` is that of the request of choice i among
   * those of the answer. Returns null, or the error that ended them early. */
  async #ask(open, views, place) {
    const controller = new AbortController();
    this.#running = controller;
    this.#buttons();
    try {
      await this.#stream(open, views, place, controller.signal);
      views.forEach((view) => view.end());
      return null;
    } catch (error) {
      const stopped = controller.signal.aborted;
      views.forEach((view) => view.end(stopped ? "stopped" : error.message, !stopped));
      if (!stopped) views[0].error.scrollIntoView({ block: "nearest" });
      return error;
    } finally {
      this.#running = null;
      this.#buttons();
    }
  }

  async #stream(open, views, place, signal) {
    const temperature = this.temperature.valueAsNumber, most = this.maxTokens.valueAsNumber;
    const options = { stream: true, temperature: temperature >= 0 ? temperature : 0.7, max_tokens: most > 0 ? most : 200 };
    let named = false, done = false;
    for await (const data of events(await open({ ...options, signal }))) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk);
      if (!named) views.forEach((view, i) => this.#name(`${chunk.id}-${place(i)}`, view));
      named = true;
      for (const choice of chunk.choices) {
        views[choice.index]?.add(choice.delta?.content ?? choice.text ?? "", choice.finish_reason);
      }
      this.#follow();
    }
    if (!done) throw new Error("the connection ended before the answer did");
  }

  /** A chat where the model has a template for one, else the bare text to be continued. */
  async #chat(messages, { signal, ...options }) {
    try {
      if (this.hasTemplate) return await accepted(await post("/v1/chat/completions", { messages, ...options }, signal));
    } catch (error) {
      this.#withoutTemplate(error);
    }
    return accepted(await post("/v1/completions", { prompt: messages.at(-1).content, ...options }, signal));
  }

  /** Several chats in one answer, for a browser opens only six connections to a server. */
  async #together(chats, { signal, ...options }) {
    let prompt = chats.map((messages) => messages.at(-1).content);
    try {
      if (this.hasTemplate) prompt = await Promise.all(chats.map((messages) => this.#tokens(messages, signal)));
    } catch (error) {
      this.#withoutTemplate(error);
    }
    return accepted(await post("/v1/completions", { prompt, ...options }, signal));
  }

  async #tokens(messages, signal) {
    const response = await accepted(await post("/tokenize", { messages }, signal));
    return (await response.json()).tokens;
  }

  /** Goes on without a template, if it is that which is missing. */
  #withoutTemplate(error) {
    if (!(error instanceof Refused && error.param === "messages" && NO_TEMPLATE.test(error.message))) throw error;
    this.hasTemplate = false;
    this.#tell("This model has no chat template: it continues your text as it stands.");
  }

  /** Asks which number a request has on the map; only who has its id can. */
  async #name(id, view) {
    try {
      const response = await request(`/live/requests/${encodeURIComponent(id)}`);
      if (response.ok) view.name((await response.json()).number);
    } catch {
      // an answer without its number is still an answer
    }
  }

  /** Shows what is asked, and an empty answer for each title. */
  #begin(text, titles) {
    this.welcome.remove();
    this.#tell("");
    this.fresh.hidden = false;
    const [mine, group] = ["mine", titles.length > 1 ? "answers" : ""].map((kind) => {
      const element = document.createElement("div");
      element.className = `message ${kind}`;
      return element;
    });
    mine.textContent = text;
    const views = titles.map((title) => new Answer(group, title, this.onHover));
    this.messages.append(mine, group);
    this.messages.scrollTop = mine.offsetTop;
    return { mine, views };
  }

  /** After a refusal: an empty conversation, with the refused message ready to be sent in it. */
  #offerNewChat(text) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button primary offer";
    button.textContent = "New chat with this message";
    button.addEventListener("click", () => {
      this.clear();
      this.prompt.value = text;
      this.#fit();
    });
    this.messages.append(button);
    button.scrollIntoView({ block: "nearest" });
  }

  #tell(text) {
    this.notice.textContent = text;
    this.notice.hidden = !text;
  }

  #buttons() {
    const busy = this.#running !== null;
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
  #next = null;
  #begun = performance.now();
  #frame = null; // the next picture's request

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
    this.body = document.createElement("div");
    this.body.className = "text";
    this.markdown = new Markdown(this.body);
    this.error = document.createElement("p");
    this.error.className = "error";
    this.error.hidden = true;
    this.element.append(this.head, this.body, this.error);
    parent.append(this.element);
    this.element.addEventListener("click", () => this.onChoose?.());
    this.element.addEventListener("keydown", (event) => event.key === "Enter" && this.onChoose?.());
    for (const name of ["pointerenter", "focus"]) this.tag.addEventListener(name, () => onHover(this.number));
    for (const name of ["pointerleave", "blur"]) this.tag.addEventListener(name, () => onHover(null));
  }

  /** Lets the reader choose this one of several answers. */
  offer(chosen, onChoose) {
    this.onChoose = onChoose;
    this.element.classList.toggle("chosen", chosen);
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "button");
    this.element.setAttribute("aria-pressed", chosen);
  }

  /** The next answer takes the place of this one, once it begins. */
  turn(title, note) {
    this.text = "";
    this.finishReason = null;
    this.#next = { title, note };
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
    if (this.#next) {
      this.title.textContent = this.#next.title;
      this.note.textContent = this.#next.note;
      this.#next = null;
    }
    this.text += text;
    this.finishReason = finishReason;
    if (finishReason) this.element.classList.remove("busy");
    this.#frame ??= requestAnimationFrame(() => this.#show());
  }

  /** Show the text so far, at most once per picture of the screen. */
  #show() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.markdown.show(this.text, this.element.classList.contains("busy"));
    this.body.scrollTop = this.body.scrollHeight;
  }

  end(note = null, failed = false) {
    this.element.classList.remove("busy");
    this.element.classList.toggle("failed", failed);
    const seconds = (performance.now() - this.#begun) / 1000;
    const cut = this.finishReason === "length" ? ", cut" : "";
    this.note.title = cut ? "The answer reached the most tokens that were asked for" : "";
    this.#show();
    this.error.hidden = !failed;
    this.error.textContent = failed ? note : "";
    this.note.textContent = failed ? "failed" : note ?? `${seconds.toFixed(1)} s${cut}`;
  }
}
