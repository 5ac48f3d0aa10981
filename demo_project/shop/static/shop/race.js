// Replaces the race on the page by its newest state until it is over. Without scripts, the page
// reloads itself.
"use strict";

function swap(now, next) {
  const ways = (race) => [...race.querySelectorAll("a, button")];
  if (ways(now).some((way) => way.matches(":active"))) return; // a click is not over yet
  const focused = ways(now).indexOf(document.activeElement);
  now.replaceWith(next);
  ways(next)[focused]?.focus({ preventScroll: true });
}

async function renew() {
  const now = document.getElementById("race");
  if (!now || !("running" in now.dataset)) return;
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const next = page.getElementById("race");
    if (next) swap(now, next);
    else location.reload(); // logged out
  } catch {
    // The server is away for a moment.
  }
  setTimeout(renew, 700);
}

setTimeout(renew, 700);
