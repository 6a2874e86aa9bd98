// @ts-check
// The page of a service: its figures, and the box to try its model.

import "/static/services/list.js";
import { Conversation } from "/static/services/conversation.js";
import { answerOf } from "/static/services/answers.js";

const form = /** @type {HTMLFormElement | null} */ (document.getElementById("try"));
const MOST_IMAGE = 1_400_000; // bytes, so that its text fits a request
const [WAITING, RECEIVING] = ["waiting for the model…", "receiving…"];
const HINTS = {
  chat: "A message; Enter sends it, Shift+Enter begins a line",
  complete: "The beginning of a text",
  classify: "A text in each line, or an image above",
  embed: "A text in each line",
  predict: 'A JSON list of inputs, such as [1.5, 2]',
};

class Box {
  #form;
  #said = new Conversation(element("try-said"));
  #text = /** @type {HTMLTextAreaElement} */ (element("try-text"));
  #problem = element("try-problem");
  #figures = element("try-figures");
  #stop = element("try-stop");
  #send;
  /** @type {AbortController | null} */
  #running = null;

  /** @param {HTMLFormElement} form */
  constructor(form) {
    this.#form = form;
    this.#send = /** @type {HTMLButtonElement} */ (form.querySelector("button[type=submit]"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try();
    });
    form.addEventListener("change", () => this.#follow());
    this.#text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.#kind !== "chat") return;
      event.preventDefault();
      this.#try();
    });
    this.#stop.addEventListener("click", () => this.#running?.abort());
    element("try-clear").addEventListener("click", () => {
      this.#said.clear();
      this.#fail("");
      this.#figures.textContent = "";
      this.#text.focus();
    });
    this.#follow();
    this.#send.disabled = false;
  }

  get #kind() {
    return this.#field("kind").value;
  }

  /** @param {string} name @returns {HTMLInputElement} */
  #field(name) {
    return /** @type {HTMLInputElement} */ (this.#form.elements.namedItem(name));
  }

  #follow() {
    for (const label of this.#form.querySelectorAll("[data-for]")) {
      /** @type {HTMLElement} */ (label).hidden = !(label.getAttribute("data-for") ?? "").split(" ").includes(this.#kind);
    }
    this.#text.placeholder = HINTS[this.#kind];
  }

  async #try() {
    if (this.#running) return;
    this.#fail("");
    const isChat = this.#kind === "chat";
    const body = await this.#body();
    if (!body) return;
    const shown = body.image ? "an image" : this.#text.value;
    if (isChat) this.#text.value = "";
    const answer = this.#said.begin(shown, isChat);
    this.#running = new AbortController();
    this.#busy(true);
    try {
      const begun = () => (this.#figures.textContent = RECEIVING);
      this.#figures.textContent = await answerOf(this.#form.action, body, this.#running.signal, answer, begun);
      this.#said.keep(answer);
    } catch (error) {
      this.#ended(error, answer, isChat ? shown : "");
    } finally {
      this.#running = null;
      this.#busy(false);
    }
  }

  async #body() {
    const image = this.#kind === "classify" ? this.#field("image").files?.[0] : undefined;
    if (image && image.size > MOST_IMAGE) return this.#fail(`The image is larger than ${MOST_IMAGE / 1e6} MB.`);
    if (!image && !this.#text.value.trim()) return this.#fail("Write something first.");
    const messages = this.#kind === "chat" ? [...this.#said.messages, { role: "user", content: this.#text.value }] : [];
    return {
      kind: this.#kind,
      text: this.#kind === "chat" || image ? "" : this.#text.value,
      messages,
      image: image ? await dataOf(image) : "",
      max_tokens: Number(this.#field("max_tokens").value) || 128,
      temperature: Number(this.#field("temperature").value),
      key: this.#field("key")?.value ?? "",
    };
  }

  #ended(error, answer, typed) {
    if (error instanceof DOMException && error.name === "AbortError") {
      this.#figures.textContent = "stopped";
      this.#said.keep(answer);
      return;
    }
    this.#said.drop(answer);
    if (typed && !this.#text.value) this.#text.value = typed; // nothing that was typed is lost
    this.#fail(error instanceof TypeError ? "The agent does not answer." : error.message);
  }

  #busy(isBusy) {
    this.#send.disabled = isBusy;
    this.#stop.hidden = !isBusy;
    if (isBusy) this.#figures.textContent = WAITING;
    else if ([WAITING, RECEIVING].includes(this.#figures.textContent ?? "")) this.#figures.textContent = "";
  }

  #fail(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
    return null;
  }
}

/** @param {string} id @returns {HTMLElement} */
function element(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** @param {File} file @returns {Promise<string>} */
function dataOf(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(String(reader.result)));
    reader.addEventListener("error", () => failed(new Error("The image cannot be read.")));
    reader.readAsDataURL(file);
  });
}

if (form) new Box(form);
