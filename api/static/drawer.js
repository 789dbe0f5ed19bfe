/** The side of the page on narrow screens: it comes over the rest and goes by Escape or a click. */

export class Drawer {
  #side;
  #button;
  #rest;

  /** `rest`: the part of the page that is inert while the drawer covers it. */
  constructor(side, button, rest) {
    this.#side = side;
    this.#button = button;
    this.#rest = rest;
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      this.#set(!this.isOpen);
      side.querySelector("button, input").focus();
    });
    side.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      event.stopPropagation();
      this.close();
      button.focus();
    });
    document.addEventListener("click", ({ target }) => {
      if (this.isOpen && !side.contains(target)) this.close();
    });
  }

  get isOpen() {
    return this.#side.classList.contains("open");
  }

  close() {
    this.#set(false);
  }

  #set(isOpen) {
    this.#side.classList.toggle("open", isOpen);
    this.#button.setAttribute("aria-expanded", String(isOpen));
    this.#rest.inert = isOpen;
  }
}
