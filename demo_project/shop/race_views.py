"""The pages of the race lab: for staff, and one race at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.decorators import permission_required
from django.http import FileResponse, Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import get_language, gettext_lazy
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from distlock_app import LockBusy, LockError

from . import race as lab
from .race_models import Race, RaceOrder
from .race_plot import plot_of
from .race_results import Result
from .race_strategies import missing, strategies
from .race_terms import TERMS, Terms

GUIDES = {"en": "docs/explanation/choosing-a-guard.md", "ko": "docs/ko/choosing-a-guard.md"}


def staff_with(permission: str) -> Callable[[Any], Any]:
    """Let only staff in who have the permission."""
    return lambda view: staff_member_required(
        permission_required(permission, raise_exception=True)(view)
    )


class TermsForm(forms.Form):
    """What one can choose on the page."""

    strategies = forms.MultipleChoiceField(
        label=gettext_lazy("Strategies"), widget=forms.CheckboxSelectMultiple
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in fields(Terms):
            label, text, low, high, step = TERMS[field.name]
            whole = isinstance(field.default, int)
            self.fields[field.name] = (forms.IntegerField if whole else forms.FloatField)(
                label=label,
                help_text=text,
                initial=field.default,
                min_value=low,
                max_value=high,
                widget=forms.NumberInput(attrs={"step": step}),
            )
        known = strategies()
        self.fields["strategies"].choices = [(s.key, s.title) for s in known.values()]  # type: ignore[attr-defined]
        self.fields["strategies"].initial = list(known)

    @property
    def numbers(self) -> list[forms.BoundField]:
        return [self[field.name] for field in fields(Terms)]


@staff_with("shop.view_race")
def races(request: HttpRequest) -> HttpResponse:
    """Show what can be chosen, and the last races; start one."""
    form = TermsForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        return start(request, form.cleaned_data)
    context = {"form": form, "missing": missing().values(), "races": Race.objects.all()}
    return render(request, "shop/races.html", context)


@permission_required("shop.add_race", raise_exception=True)
def start(request: HttpRequest, chosen: dict[str, Any]) -> HttpResponse:
    keys = chosen.pop("strategies")
    try:
        return redirect(lab.start(Terms(**chosen), keys, by=request.user.get_username()))
    except LockBusy:
        messages.error(request, _("A race is already running: the first one below."))
    except LockError as error:
        messages.error(request, _("No race was started: %(error)s") % {"error": error})
    return redirect("races")


@staff_with("shop.view_race")
@require_GET
def race(request: HttpRequest, pk: int) -> HttpResponse:
    """Show how a race goes, and how it went."""
    race = get_object_or_404(Race, pk=pk)
    lab.look_after(race)
    results = lab.results_of(race)
    titles = {key: strategy.title for key, strategy in strategies().items()}
    run = [result for result in results if not result.skipped]
    chosen = [(term.label, race.terms[name]) for name, term in TERMS.items()]
    context = {
        "race": race,
        "terms": chosen,
        "steps": steps(race, results, titles),
        "results": [(titles.get(r.strategy, r.title), r) for r in results],
        "plot": plot_of(run, titles) if run else None,
        "findings": findings(run, titles),
    }
    return render(request, "shop/race.html", context)


@staff_with("shop.add_race")
@require_POST
def cancel(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop a race: its buyers are ended."""
    race = get_object_or_404(Race, pk=pk)
    lab.cancel(race)
    return redirect(race)


@require_GET
def guide(request: HttpRequest) -> FileResponse:
    """Send the page of the documentation that tells which guard fits."""
    try:
        file = (settings.BASE_DIR.parent / GUIDES[get_language()]).open("rb")
    except OSError:
        raise Http404 from None
    return FileResponse(file, content_type="text/plain; charset=utf-8")


@dataclass(frozen=True, slots=True)
class Step:
    """Where one strategy of a race stands."""

    title: Any
    state: str  # "done", "skipped", "running" or "waiting"
    percent: int


def steps(race: Race, results: list[Result], titles: dict[str, Any]) -> list[Step]:
    """Return the strategies of a race in their order."""
    found = [
        Step(titles.get(r.strategy, r.title), "skipped" if r.skipped else "done", 100)
        for r in results
    ]
    for number, key in enumerate(race.strategies[len(results) :]):
        running = number == 0 and not race.is_over
        percent = progress(race, key) if running else 0
        found.append(Step(titles.get(key, key), "running" if running else "waiting", percent))
    return found


def progress(race: Race, key: str) -> int:
    """Return how many per cent of what can be sold is sold."""
    sold = RaceOrder.objects.filter(item__race=race, item__strategy=key).count()
    return min(100, 100 * sold // min(race.terms["stock"], race.terms["purchases"]))


def findings(results: list[Result], titles: dict[str, Any]) -> list[str]:
    """Say what the numbers mean to somebody who sees them for the first time."""
    by_key = {result.strategy: result for result in results}
    found = []
    if naive := by_key.get("none"):
        if naive.right:
            text = _(
                "Without a guard nothing went wrong this time. That was luck: it ends with more "
                "buyers or a longer think time."
            )
        else:
            text = _(
                "Without a guard, %(oversold)d units were sold that did not exist, and %(lost)d "
                "sales are missing from the stock."
            )
        found.append(text % {"oversold": naive.oversold, "lost": naive.lost})
    if right := [result for result in results if result.right and result.promises]:
        best = max(right, key=lambda result: result.throughput)
        text = _("Fastest without a mistake: %(title)s, %(rate)d units per second.")
        title = titles.get(best.strategy, best.title)
        found.append(text % {"title": title, "rate": round(best.throughput)})
    if (tried := by_key.get("optimistic")) and tried.sold:
        if tried.retries * 10 > tried.sold:
            text = _(
                "Optimistic: %(sold)d sales needed %(retries)d retries. Writes collide often "
                "here, which is fine only if a retry is cheap."
            )
        else:
            text = _(
                "Optimistic: %(sold)d sales needed %(retries)d retries. Writes rarely collide "
                "here, and no buyer waited."
            )
        found.append(text % {"retries": tried.retries, "sold": tried.sold})
    return found
