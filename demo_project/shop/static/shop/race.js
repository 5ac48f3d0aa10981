// Replaces the race on the page by its newest state until it is over. Without scripts, the page
// reloads itself.
"use strict";

async function renew() {
  const now = document.getElementById("race");
  if (!now || !("running" in now.dataset)) return;
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const next = page.getElementById("race");
    if (next) now.replaceWith(next);
    else location.reload(); // logged out
  } catch {
    // The server is away for a moment.
  }
  setTimeout(renew, 700);
}

setTimeout(renew, 700);
