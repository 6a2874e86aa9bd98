// @ts-check
// What was said in the box to try a model: texts of people and answers, as text and never as HTML.

export class Conversation {
  #place;
  /** @type {{role: string, content: string}[]} what a model gets to see of it */
  messages = [];
  #asked = "";
  #isChat = false;

  /** @param {HTMLElement} place */
  constructor(place) {
    this.#place = place;
  }

  /** Shows what is asked, and a place for the answer, which is returned. @param {string} text @param {boolean} isChat */
  begin(text, isChat) {
    this.#asked = text;
    this.#isChat = isChat;
    if (!isChat) this.#place.replaceChildren();
    const own = turn("you", text);
    const answer = turn("model", "");
    answer.setAttribute("aria-busy", "true");
    this.#place.append(own, answer);
    this.#place.scrollTop = this.#place.scrollHeight;
    return answer;
  }

  /** It was answered, at least in part. @param {HTMLElement} answer */
  keep(answer) {
    answer.removeAttribute("aria-busy");
    const said = answer.querySelector(".said")?.textContent ?? "";
    if (this.#isChat && said) this.messages.push({ role: "user", content: this.#asked }, { role: "assistant", content: said });
    if (!said && !answer.querySelector("table")) this.drop(answer);
  }

  /** It was not answered. @param {HTMLElement} answer */
  drop(answer) {
    answer.previousElementSibling?.remove();
    answer.remove();
  }

  clear() {
    this.messages = [];
    this.#place.replaceChildren();
  }
}

function turn(who, text) {
  const made = Object.assign(document.createElement("div"), { className: `turn ${who}` });
  made.append(
    Object.assign(document.createElement("b"), { textContent: who }),
    Object.assign(document.createElement("div"), { className: "said", textContent: text }),
  );
  return made;
}
