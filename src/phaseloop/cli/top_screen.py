"""How `phaseloop top` looks."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phaseloop.runtime.timeline import Look, Stretch

from .top_board import PAST_NS, Board

STRIP = 40  # characters
SPARKS = " ▁▂▃▄▅▆▇█"
# A sign for each look, so that colour is never the only one.
SIGNS: dict[Look | None, tuple[str, str]] = {
    None: (" ", ""),
    "waiting": ("░", "bright_blue"),
    "prefill": ("▚", "blue"),
    "copy": ("≡", "white"),
    "ready": ("▌", "yellow"),
    "decode": ("█", "green"),
    "parked": ("▒", "magenta"),
    "leaving": ("·", "white"),
    "idle": ("·", "bright_black"),
}
NAMES: dict[Look, str] = {
    "waiting": "waits",
    "prefill": "prefill",
    "copy": "copies",
    "ready": "ready",
    "decode": "decode",
    "parked": "parked",
    "leaving": "leaves",
    "idle": "idle",
}


def screen(board: Board, server: str, problem: str) -> RenderableType:
    """`problem` is what keeps it from being up to date; empty if nothing does."""
    lines: list[RenderableType] = [title(board, server)]
    if problem:
        lines.append(Text(shown(problem), style="bold yellow"))
    if board.head is not None:
        lines += [figures_line(board), queue_line(board), slots_table(board), legend()]
    return Group(*lines)


def title(board: Board, server: str) -> Text:
    text = Text.assemble(("phaseloop ", "bold"), shown(server))
    turn = board.turn
    if turn is not None:
        sign, style = SIGNS[turn.phase]
        sealed = ", sealed" if turn.sealed else ""
        text.append("   ").append(f"{sign} {turn.phase}", style=f"bold {style}")
        text.append(f"   cohort {turn.cohort}{sealed}   {shown(turn.policy)}")
    return text


def figures_line(board: Board) -> Text:
    assert board.head is not None
    text = Text(f"seated {board.seated()} of {board.head.slot_count}")
    if board.figures is not None:
        figures = board.figures
        text.append(f"   KV pages {figures.pages_reserved:,} of {board.head.page_count:,}")
        text.append(f", {figures.pages_idle:,} cached")
        if figures.saved:
            text.append(f"   {figures.saved} in host RAM")
    rates = board.rates()
    if rates is not None:
        text.append(f"   tokens/s: prompt {rates.prompt:,.0f}, answers {rates.generated:,.0f} ")
        text.append(sparks([one.generated for one in board.samples]), style="green")
    return text


def queue_line(board: Board) -> Text:
    line = board.line
    text = Text(f"queue {0 if line is None else line.length}")
    if line is not None and line.reason is not None:
        text.append(f"   first #{line.request_id}: {why(board, line.reason)}", style="yellow")
    if board.ends:
        ends = ", ".join(f"{shown(reason)} {count}" for reason, count in board.ends.items())
        text.append(f"   ended early: {ends}", style="red")
    return text


def slots_table(board: Board) -> Table:
    assert board.head is not None
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    seconds = PAST_NS // 1_000_000_000
    for name in ("slot", "state", "request", "for", f"the last {seconds} s", "why"):
        table.add_column(name, no_wrap=name != "why", header_style="bold")
    for slot in range(board.head.slot_count):
        stretch = board.present(slot)
        sign, style = SIGNS[stretch.look]
        state = Text(f"{sign} {NAMES[stretch.look]}", style=style)
        request = "" if stretch.request_id is None else f"#{stretch.request_id}"
        if stretch.choice:
            request += f".{stretch.choice}"
        reason = "" if stretch.reason is None else why(board, stretch.reason)
        if stretch.waits_for:
            reason += f" ({', '.join(f'#{one}' for one in stretch.waits_for)})"
        since = since_text(board, stretch)
        table.add_row(str(slot), state, request, since, strip(board, slot), Text(reason))
    return table


def since_text(board: Board, stretch: Stretch) -> str:
    if stretch.look == "idle":
        return ""
    lasted_ns, began_before = board.since_ns(stretch)
    return f"{lasted_ns / 1e9:.1f} s" + ("+" if began_before else "")


def strip(board: Board, slot: int) -> Text:
    text = Text()
    for look in board.looks(slot, STRIP):
        sign, style = SIGNS[look]
        text.append(sign, style=style)
    return text


def legend() -> Text:
    text = Text()
    for look, name in NAMES.items():
        sign, style = SIGNS[look]
        text.append(sign, style=style).append(f" {name}  ", style="bright_black")
    return text


def why(board: Board, reason: str) -> str:
    reasons: dict[str, str] = {} if board.head is None else dict(board.head.reasons.items())
    return shown(reasons.get(reason, reason))


def sparks(values: list[float]) -> str:
    most = max(values, default=0)
    if most <= 0:
        return ""
    return "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in values)


def shown(text: str) -> str:
    """What a server says, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)
