"""The builder's commands; the Makefile calls them."""

import argparse
import sys
from pathlib import Path

from . import chapters, stamps

ROOT = Path(__file__).resolve().parent.parent


def book(args: argparse.Namespace) -> None:
    chapters.make(ROOT)
    make_readme(args)
    render(args)


def run(args: argparse.Namespace) -> None:
    chapters.make(ROOT, [Path(name).stem for name in args.only], "none" if args.no_slow else "stale")


def refresh(args: argparse.Namespace) -> None:
    chapters.make(ROOT, [Path(name).stem for name in args.only], refresh=True)


def status(args: argparse.Namespace) -> None:
    fine = True
    for chapter in stamps.book(ROOT):
        found = chapter.problems()
        fine = fine and not found
        print(f"{chapter.name}: {'up to date' if not found else 'out of date'}; depends on {', '.join(sorted(chapter.imported | chapter.data)) or 'no module'}")
        for problem in found[:None if args.all else 5]: print(f"    {problem}")
        if len(found) > 5 and not args.all: print(f"    ... and {len(found) - 5} more (--all)")
    if not fine: raise chapters.Failed("make book brings them up to date.")


def export(args: argparse.Namespace) -> None:
    print("exported:", ", ".join(chapters.export(ROOT)) or "nothing changed")


def make_readme(args: argparse.Namespace) -> None:
    from . import readme

    readme.make(ROOT)


def lint(args: argparse.Namespace) -> None:
    from . import lint

    found = lint.problems(ROOT)
    if found: raise chapters.Failed("\n".join(found))
    print("lint: nothing found")


def render(args: argparse.Namespace) -> None:
    from . import pages, site

    try: site.build(ROOT)
    except pages.SiteError as error: raise chapters.Failed(f"site: {error}") from None


def serve(args: argparse.Namespace) -> None:
    from . import site

    if not (ROOT / "_docs" / "index.html").exists(): book(args)
    try: site.serve(ROOT, args.port)
    except OSError as error: raise chapters.Failed(f"port {args.port}: {error.strerror}; make serve PORT=8001 takes another one") from None


def bench(args: argparse.Namespace) -> None:
    from minigpt import speed

    speed.bench(args.rounds)


COMMANDS = {
    "book": (book, "export, run what is out of date, write README.md, render the site into _docs"),
    "export": (export, "write minigpt/ from the notebooks"),
    "run": (run, "export, then run the notebooks whose stored outputs are out of date"),
    "refresh": (refresh, "run every notebook anew, slow cells included, and save what they ship"),
    "status": (status, "say which notebooks are out of date, and why; exit 1 if any is"),
    "readme": (make_readme, "write README.md from nbs/index.ipynb"),
    "lint": (lint, "look for library layers in by-hand code, and for breaches of the house style"),
    "site": (render, "render the notebooks as they are"),
    "serve": (serve, "serve the rendered site"),
    "bench": (bench, "race our models against others on this machine"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (function, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(function=function)
        if name in ("run", "refresh"): command.add_argument("--only", action="append", default=[], metavar="nbs/02_attention.ipynb", help="this notebook only; may be repeated")
        if name == "run": command.add_argument("--no-slow", action="store_true", help="leave slow cells as they are, even those out of date")
        if name == "status": command.add_argument("--all", action="store_true", help="every reason, not only the first five")
        if name == "bench": command.add_argument("--rounds", type=int, default=15)
        if name == "serve": command.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    try: args.function(args)
    except chapters.Failed as failure: sys.exit(str(failure))


if __name__ == "__main__":
    main()
