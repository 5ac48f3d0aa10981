// Reads the list of live locks again every few seconds while its button is pressed. Without
// JavaScript there is no button, and the page is reloaded by hand.
"use strict";
(function () {
  const EVERY = 3000;
  const PATIENCE = 10000;
  const KEY = "distlock-refresh";
  const PARTS = [".dl-backends > ul", ".dl-read", ".dl-notes", "#result_list", ".paginator"];

  function swap(fresh) {
    const pairs = PARTS.map((part) => [document.querySelector(part), fresh.querySelector(part)]);
    if (pairs.some(([old, next]) => !old !== !next)) {
      location.reload(); // the first lock came, the last went, or the session ended
      return;
    }
    const focused = document.activeElement;
    for (const [old, next] of pairs) {
      if (old) old.replaceWith(document.adoptNode(next));
    }
    if (focused && !focused.isConnected) {
      const name = ["id", "href", "value"].find((known) => focused.hasAttribute(known));
      const value = name && CSS.escape(focused.getAttribute(name));
      const again = name && document.querySelector("[" + name + '="' + value + '"]');
      if (again) again.focus({ preventScroll: true });
    }
    // Django's own script for the boxes of the rows knows those that were there before.
    const counters = [document, fresh].map((page) => page.querySelector(".action-counter"));
    if (counters[0] && counters[1]) {
      counters[0].dataset.actionsIcnt = counters[1].dataset.actionsIcnt;
    }
    const boxes = document.querySelectorAll("tr input.action-select");
    if (boxes.length && window.Actions) window.Actions(boxes);
  }

  function chosen() {
    return document.querySelector("input.action-select:checked");
  }

  async function refresh(failed) {
    // Nothing that the user works on: not while rows are chosen, not in a hidden tab.
    if (document.hidden || chosen()) return;
    try {
      const answer = await fetch(location.href, {
        headers: { Accept: "text/html" },
        signal: AbortSignal.timeout(PATIENCE),
      });
      const came = performance.now();
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (chosen()) return; // meanwhile
      document.documentElement.dataset.dlCame = String(came);
      swap(fresh);
      failed.hidden = true;
    } catch {
      failed.hidden = false;
    }
  }

  document.addEventListener("DOMContentLoaded", function () {
    const button = document.querySelector("button.dl-refresh");
    const failed = document.querySelector(".dl-failed");
    if (!button) return;
    let timer = 0;

    async function again() {
      await refresh(failed);
      if (!timer) return;
      clearTimeout(timer); // of a second press meanwhile
      timer = setTimeout(again, EVERY);
    }
    function turn(on) {
      button.setAttribute("aria-pressed", String(on));
      document.documentElement.classList.toggle("dl-refreshing", on); // what is said, by locks.css
      clearTimeout(timer);
      timer = on ? setTimeout(again, EVERY) : 0;
    }

    button.hidden = false;
    button.addEventListener("click", function () {
      const on = button.getAttribute("aria-pressed") !== "true";
      if (on) sessionStorage.setItem(KEY, "on");
      else sessionStorage.removeItem(KEY);
      turn(on);
    });
    turn(sessionStorage.getItem(KEY) === "on");
  });
})();
