"""How many drafted tokens each row of a round verifies: as many as pay, none where none do.

A round commits one token for each decoding row and one for each drafted token that is accepted. What it
costs depends on how many tokens are verified, how many rows draft, and whether the draft's context is
written. The policy takes the choice with the most committed tokens per second, against plain decoding
without any draft. Any choice gives the same tokens, so it may be an estimate; what it must not do is lose.

Drafts that do not pay now may pay later, when the load falls or the text changes:
- Chances and times are known for any load, so a change of load is answered in the next round.
- A trial now and then drafts although it is not expected to pay, or does not although it is, since times
  and chances of what is not done grow old. It is paid for from what all rounds set aside, TRIAL_SHARE of
  the time of plain ones, and trials in vain become rare.
- The draft's context goes on being written for CONTEXT_SPELL rounds. After that it is not, and a row can
  draft again only once it is rebuilt (`worth_rebuilding`): its known tokens are fed a second time.

No clock and no randomness: the same calls give the same choices. The rounds observed may lag behind the
rounds chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from dflash_engine.acceptance import Acceptance
from dflash_engine.draft_search import Candidate, DraftSearch, Load, Option
from dflash_engine.step_times import StepTimes

CONTEXT_SPELL = 64
"""Rounds without a draft after which its context is no longer written. Short, because each costs a few per
cent of a round; long enough that a load which goes up and down does not rebuild rows each time."""
RESUME_GAIN = 1.03
"""How much faster drafting must look before context is written again: coming back costs rebuilding rows."""
TRIAL_SHARE = 0.01
"""Of a plain round's time, for each round: what trials may lose, by the estimate made before them."""
FIRST_WAIT = 16
MOST_WAIT = 1024
"""Rounds between trials: doubled by each, back to the first when drafting begins or ceases to pay."""
TRIAL_SPELL = 16
"""Rounds for which a trial has context written where it was no longer: a rebuilt row drafts in them."""
OTHERS_SHARE = 0.02
"""Weight of a round in the running mean of what prompts cost."""

_MOST, _MISSING = map(attrgetter, ("most", "missing_context"))


@dataclass(frozen=True, slots=True)
class Choice:
    num_draft: tuple[int, ...]
    """Drafted tokens to verify, for each candidate in order."""
    write_context: bool
    reason: str
    """For logs: "pays", "plain", "trial" (also what prepares one), "resume" (rebuilding would pay)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoding row of a round that ran."""

    request_id: int
    num_verified: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What drafting would bring if no row's context were missing."""

    rate: float
    depth: int
    """Tokens verified in a row that drafts."""
    row_s: float
    """What such a row adds to the round."""


class DraftPolicy:
    """`block_length` counts the anchor: at most block_length - 1 drafted tokens are verified."""

    def __init__(self, times: StepTimes, acceptance: Acceptance, block_length: int) -> None:
        assert acceptance.most == block_length - 1, (acceptance.most, block_length)
        self._times = times
        self._acceptance = acceptance
        self._search = DraftSearch(times, acceptance)
        self._most = block_length - 1
        self._others_row_s = 0.0
        self._drafts = True
        self._idle_rounds = 0
        self._since_trial = 0
        self._wait = FIRST_WAIT
        self._set_aside_s = 0.0
        self._spell_left = 0
        self._trial_request: int | None = None
        self._outlook: _Outlook | None = None

    def choose(self, rows: Sequence[Candidate], other_tokens: int) -> Choice:
        """For a round of these decoding rows and `other_tokens` query tokens of prompts.

        Without rows nothing can draft and nothing is decided: context is written or not as before.
        """
        if not rows:
            return Choice((), self._writes_context(), "plain")
        load = self._load(len(rows), other_tokens)
        most = list(map(_MOST, rows))
        option = self._search.best(rows, most, load) if any(most) else None
        pays = option is not None and option.rate > load.plain_rate
        self._outlook = self._look_out(rows, load, 1.0 if pays else RESUME_GAIN)
        self._count_round(pays or self._outlook is not None, load)
        none = (0,) * len(rows)
        if option is not None and pays:
            if self._starts_trial(load.plain_s - load.num_rows / option.rate):
                return Choice(none, True, "trial")
            return Choice(option.num_draft, True, "pays")
        if self._outlook is not None:
            return Choice(none, True, "resume")
        if option is not None and self._tries(option, load):
            return Choice(option.num_draft, True, "trial")
        if not self._writes_context():
            self._prepares_trial([row for row in rows if row.missing_context], load)
        return Choice(none, self._writes_context(), "trial" if self._spell_left else "plain")

    def worth_rebuilding(self, candidate: Candidate, remaining_tokens: int) -> bool:
        """Whether to feed the known tokens again whose draft context is missing.

        Over the `remaining_tokens` expected of the answer, drafting must save more than that costs, at
        the load of the last `choose`. A trial rebuilds one row whatever it saves.
        """
        if candidate.request_id == self._trial_request:
            return True
        if self._outlook is None:
            return False
        gain = sum(self._acceptance.chances(candidate.request_id, self._outlook.depth))
        saved_s = gain / self._outlook.rate - self._outlook.row_s
        return saved_s * remaining_tokens / (1 + gain) > self._rebuild_s(candidate)

    def observe_round(
        self,
        outcomes: Sequence[Outcome],
        other_tokens: int,
        write_context: bool,
        seconds: float | None = None,
    ) -> None:
        """What a round gave, and what it took if that is known: device time, or the round's own wall time.

        `outcomes` are the round's decoding rows, those that verified nothing too.
        """
        verified = [outcome.num_verified for outcome in outcomes]
        if outcomes:
            ids = [outcome.request_id for outcome in outcomes]
            self._acceptance.observe_round(ids, verified, [outcome.num_accepted for outcome in outcomes])
        if seconds is not None:
            num_tokens = len(outcomes) + sum(verified) + other_tokens
            num_drafting = len(verified) - verified.count(0)
            self._times.observe_round(num_tokens, len(outcomes), num_drafting, write_context, seconds)

    def forget(self, request_id: int) -> None:
        """The request has ended; its last outcome is to be observed before."""
        self._acceptance.forget(request_id)

    def _writes_context(self) -> bool:
        return self._idle_rounds <= CONTEXT_SPELL or self._spell_left > 0

    def _load(self, num_rows: int, other_tokens: int) -> Load:
        # A round with a prompt in it is long whatever is drafted. Seen alone, its low rate would make any
        # draft look good; the time of prompts is therefore spread evenly over all rounds' rows.
        verify_s = self._times.verify(num_rows + other_tokens)
        others_s = verify_s - self._times.verify(num_rows) if other_tokens else 0.0
        self._others_row_s += OTHERS_SHARE * (others_s / num_rows - self._others_row_s)
        shift_s = num_rows * self._others_row_s - others_s
        plain_s = max(self._times.floor(num_rows), verify_s) + shift_s
        return Load(num_rows, num_rows + other_tokens, shift_s, plain_s)

    def _look_out(self, rows: Sequence[Candidate], load: Load, least_gain: float) -> _Outlook | None:
        """What drafting would bring with every row's context there, if more than least_gain x plain."""
        missing = list(map(_MISSING, rows))
        if not any(missing):
            return None
        most = [self._most if gap else row.most for row, gap in zip(rows, missing, strict=True)]
        option = self._search.best(rows, most, load)
        if option.rate <= least_gain * load.plain_rate:
            return None
        drafting = [count for count in option.num_draft if count]
        row_s = max(option.seconds - load.plain_s, 0.0) / len(drafting)
        return _Outlook(option.rate, max(1, round(sum(drafting) / len(drafting))), row_s)

    def _count_round(self, drafts: bool, load: Load) -> None:
        if drafts != self._drafts:
            self._drafts, self._since_trial, self._wait = drafts, 0, FIRST_WAIT
        self._since_trial += 1
        self._idle_rounds = 0 if drafts else self._idle_rounds + 1
        self._spell_left = 0 if drafts else max(self._spell_left - 1, 0)
        if not self._spell_left:
            self._trial_request = None
        # What is set aside in a long time must not be spent at once.
        share_s = TRIAL_SHARE * load.plain_s
        self._set_aside_s = min(self._set_aside_s + share_s, MOST_WAIT * share_s)

    def _tries(self, option: Option, load: Load) -> bool:
        """Whether to draft although it does not pay; in a trial's spell, as often as can be afforded."""
        loss_s = max(option.seconds - (load.num_rows + option.gain) / load.plain_rate, 0.0)
        if self._spell_left and loss_s <= self._set_aside_s:
            self._set_aside_s -= loss_s
            return True
        return self._starts_trial(loss_s)

    def _prepares_trial(self, missing: Sequence[Candidate], load: Load) -> None:
        """Without context no row can draft: has it written for a while, and the cheapest row rebuilt."""
        if not missing or self._since_trial < self._wait:
            return
        cheapest = min(missing, key=lambda row: row.missing_context)
        loss_s = self._rebuild_s(cheapest) + TRIAL_SPELL * self._times.context(load.num_tokens)
        if self._starts_trial(loss_s):
            self._spell_left, self._trial_request = TRIAL_SPELL, cheapest.request_id

    def _rebuild_s(self, candidate: Candidate) -> float:
        num_tokens = candidate.missing_context
        return self._times.verify(num_tokens) + self._times.context(num_tokens)

    def _starts_trial(self, loss_s: float) -> bool:
        if self._since_trial < self._wait or loss_s > self._set_aside_s:
            return False
        self._set_aside_s -= loss_s
        self._since_trial, self._wait = 0, min(2 * self._wait, MOST_WAIT)
        return True
