"""Export the package from the notebooks, and run the notebooks whose stored outputs are out of date."""

import ast
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from . import notebooks, stamps
from .stamps import PACKAGE, Chapter

KERNELSPEC = {"display_name": "python3", "language": "python", "name": "python3"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "PYTHONHASHSEED": "0"}
WORKERS = 2
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "", "CUDA_PATH": ""}  # outputs are a CPU's everywhere; without the paths torch says nothing of a missing runtime
TRANSPORT = "ipc" if os.name == "posix" else "tcp"


class Failed(Exception):
    "Something the builder was asked to do did not work; the message says what, for people."


def environment(root: Path, **extra: str) -> dict[str, str]:
    "The environment in which notebooks run: one thread, no GPU, no progress bars, the checkout first, nothing of the user's settings."
    matplotlib = find_spec("matplotlib")
    defaults = {"MATPLOTLIBRC": str(Path(matplotlib.origin).parent / "mpl-data" / "matplotlibrc")} if matplotlib and matplotlib.origin else {}
    inherited = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "MINIGPT_REFRESH", "IN_TEST", "PYTHONSTARTUP")}
    return inherited | defaults | ONE_THREAD | NO_GPU | {"PYTHONPATH": str(root), "PYTHONUTF8": "1"} | extra


# Export


def exported(root: Path, into: Path) -> Path:
    "Export the notebooks into an empty copy of the project under `into`; return the package folder that nbdev wrote there."
    (into / "nbs").mkdir()
    shutil.copy(root / "settings.ini", into)
    for path in notebooks.paths(root):
        check_syntax(path)
        shutil.copy(path, into / "nbs")
    run = subprocess.run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"],
                         cwd=into, env=environment(into), capture_output=True, text=True)
    if run.returncode or not (into / PACKAGE).is_dir(): raise Failed(f"nbdev_export failed:\n{run.stdout}{run.stderr}")
    return into / PACKAGE


def check_syntax(path: Path) -> None:
    "Name the cell that cannot be exported; nbdev's own message does not."
    for i, cell in enumerate(notebooks.read(path)["cells"]):
        if not notebooks.exported(cell): continue
        try: ast.parse(notebooks.split(cell)[1])
        except SyntaxError as error: raise Failed(f"{path.name}, cell {i}, is exported and no Python: {error}") from None


def export(root: Path) -> list[str]:
    "Make the modules what the notebooks say, and nothing else; return the names of those that changed."
    with tempfile.TemporaryDirectory() as temporary:
        made = {p.name: p.read_text(encoding="utf-8") for p in exported(root, Path(temporary)).glob("*.py")}
    package = root / PACKAGE
    package.mkdir(exist_ok=True)
    there = {p.name: p.read_text(encoding="utf-8") for p in package.glob("*.py")}
    changed = [name for name in sorted(made) if there.get(name) != made[name]]
    for name in changed: notebooks.write(package / name, made[name])
    for name in sorted(there.keys() - made.keys()):
        (package / name).unlink()
        changed.append(f"{name} (removed: no notebook makes it)")
    return changed


# One notebook


def to_run(chapter: Chapter, slow: str) -> set[int]:
    """Indices of the cells to run: all that are not slow, and of the slow ones all (`"all"`), none (`"none"`), or those
    that are out of date with the slow ones they build upon (`"stale"`)."""
    stale = {"all": [c for c in chapter.cells if c.slow], "none": [], "stale": chapter.stale_slow()}[slow]
    behind = {b.index for c in stale for b in chapter.behind(c)}
    return {c.index for c in chapter.cells if not c.slow or c in stale or c.index in behind}


class Quiet:
    "Lets cells of several notebooks run at the same time, but a timed one alone: it waits for the others' cells to end, and no new one starts meanwhile."

    def __init__(self): self.running, self.alone, self.changed = 0, False, asyncio.Condition()

    def around(self, chapter: Chapter, index: int) -> AbstractAsyncContextManager[None]:
        timed = any(c.index == index and c.timed for c in chapter.cells)
        return self.by_itself() if timed else self.with_others()

    @asynccontextmanager
    async def with_others(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.alone)
            self.running += 1
        try: yield
        finally:
            self.running -= 1
            async with self.changed: self.changed.notify_all()

    @asynccontextmanager
    async def by_itself(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.alone)
            self.alone = True
        try:
            async with self.changed: await self.changed.wait_for(lambda: not self.running)
            yield
        finally:
            self.alone = False
            async with self.changed: self.changed.notify_all()


async def outputs(root: Path, chapter: Chapter, chosen: set[int], extra: dict[str, str], quiet: Quiet) -> dict[int, list[dict]]:
    "Run the chosen cells in a fresh kernel of this Python, top to bottom; return their outputs."
    import nbformat
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class OurPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="python3", language="python")

    node = nbformat.reads(notebooks.text(chapter.nb), as_version=4)
    with tempfile.TemporaryDirectory() as temporary:
        manager = AsyncKernelManager(kernel_spec_manager=OurPython(), connection_file=str(Path(temporary) / "kernel.json"), transport=TRANSPORT)
        client = NotebookClient(node, km=manager, timeout=None, allow_errors=False, force_raise_errors=True, record_timing=False, coalesce_streams=True)
        client.owns_km = True
        client.reset_execution_trackers()
        async with client.async_setup_kernel(cwd=str(root / "nbs"), env=environment(root, IPYTHONDIR=temporary, **extra)):
            for i in sorted(chosen):
                async with quiet.around(chapter, i): await client.async_execute_cell(node.cells[i], i)
    return {i: [plain(output) for output in node.cells[i].outputs] for i in chosen}


def plain(output: dict) -> dict:
    "An output as it is stored: texts as lists of lines, pictures as one string."
    output = {k: v for k, v in output.items() if k != "transient"}
    if isinstance(output.get("text"), str): output["text"] = output["text"].splitlines(True)
    if "data" in output:
        output["data"] = {k: v.splitlines(True) if isinstance(v, str) and (k.startswith("text/") or "+xml" in k or "javascript" in k) else v
                          for k, v in output["data"].items()}
    return output


def stored(chapter: Chapter, made: dict[int, list[dict]]) -> str:
    "The notebook's file with new outputs and records: no counts, no times, nothing that a second run would change."
    from nbdev.clean import clean_nb

    nb = chapter.nb
    for cell in nb["cells"]: cell["source"] = notebooks.source(cell).splitlines(True)
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] == "code" and not notebooks.runs(cell):
            cell["outputs"] = []
            cell["metadata"].pop(PACKAGE, None)
    for c in chapter.cells: c.cell["outputs"] = made.get(c.index, c.cell["outputs"])
    nb["metadata"] |= {"kernelspec": dict(KERNELSPEC), PACKAGE: {"stamp": chapter.stamp}}
    for i, cell in enumerate(nb["cells"]): cell.setdefault("id", stamps.digest(chapter.name, str(i), notebooks.source(cell))[:8])
    clean_nb(nb, False, [PACKAGE], [PACKAGE])
    for c in chapter.cells:
        if c.index in made: c.cell["metadata"][PACKAGE] = c.new_record() | ({"stamp": chapter.slow_stamp(c)} if c.slow else {})
    return notebooks.text(nb)


async def run(root: Path, chapter: Chapter, slow: str, extra: dict[str, str], quiet: Quiet, say=print) -> None:
    "Run one notebook and store what it shows. Its file is left as it was if a cell fails, or if somebody edits it meanwhile."
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    chosen, _ = to_run(chapter, slow), chapter.stamp  # the stamp says what the run started from, so it is taken now
    for c in chapter.cells:
        if c.slow and c.index in chosen: say(f"{chapter.name}: running slow cell {c.index}: {c.first_line}")
    start = time.perf_counter()
    try: made = await outputs(root, chapter, chosen, extra | {"MINIGPT_STAMP": chapter.stamp}, quiet)
    except CellExecutionError as error: raise Failed(f"{chapter.name} failed; its file is as it was.\n{COLOUR.sub('', str(error))}") from None
    except (DeadKernelError, AssertionError) as error:  # nbclient's own cleaning up fails after a dead kernel
        if not isinstance(error, DeadKernelError) and not isinstance(error.__context__, DeadKernelError): raise
        raise Failed(f"{chapter.name}: the kernel died; its file is as it was.") from None
    content = stored(chapter, made)
    if chapter.path.read_bytes() != chapter.original: raise Failed(f"{chapter.name} was edited while it ran; the edit is kept, run it again.")
    notebooks.write(chapter.path, content)
    kept = sum(c.slow and c.index not in chosen for c in chapter.cells)
    say(f"{chapter.name}: {len(chosen)} cells ran in {time.perf_counter() - start:.1f} s" + (f", outputs of {kept} slow ones kept" if kept else ""))


# All of them


def after(chapter: Chapter, others: list[Chapter]) -> list[Chapter]:
    "Those of `others` that may write a data file which this chapter depends on and does not write itself."
    return [o for o in others if o is not chapter and o.owned & chapter.data - chapter.owned]


async def run_all(root: Path, chapters: list[Chapter], slow: str, extra: dict[str, str], say=print) -> list[str]:
    "Run notebooks, two at a time, writers of data files before their readers and timed cells alone; return what failed."
    slots, quiet = asyncio.Semaphore(WORKERS), Quiet()
    done = {c.name: asyncio.Event() for c in chapters}
    failures: list[str] = []

    async def one(chapter: Chapter) -> None:
        for other in after(chapter, chapters): await done[other.name].wait()
        try:
            async with slots: await run(root, chapter, slow, extra, quiet, say)
        except Failed as failure: failures.append(str(failure))
        finally: done[chapter.name].set()

    await asyncio.gather(*(one(c) for c in chapters))
    return failures


def make(root: Path, only: Collection[str] = (), slow: str = "stale", refresh: bool = False, say=print) -> None:
    """Export, then run the notebooks that are out of date until none is; on refresh all of them first, slow cells included.

    `only` names the notebooks to look at; `slow="none"` leaves slow cells as they are. Raises `Failed`, after all others have run, if a notebook fails."""
    for path in notebooks.paths(root):
        nb = notebooks.read(path)
        if (installing := notebooks.with_installation(nb, notebooks.settings(root).get("git_url", ""))) != nb: notebooks.write(path, notebooks.text(installing))
    changed = export(root)
    if changed: say(f"exported: {', '.join(changed)}")
    for attempt in range(3):
        everything = refresh and attempt == 0
        todo = [c for c in stamps.book(root, only=only) if everything or c.why_stale(slow=slow != "none")]
        if not todo: return say("every chapter is up to date")
        if attempt == 2: raise Failed(f"still out of date after two runs: {', '.join(c.name for c in todo)}. Does a cell write what the chapter depends on?")
        say(f"running {', '.join(c.name for c in todo)}")
        failures = asyncio.run(run_all(root, todo, "all" if everything else slow, {"MINIGPT_REFRESH": "1"} if everything else {}, say))
        if failures: raise Failed("\n\n".join(failures))
