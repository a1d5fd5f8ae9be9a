"""Makes the pictures of docs/dashboard.md: a gateway with believable runs, looked at by Chromium.

.venv/bin/python docs/dashboard/make_screenshots.py
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from playwright.async_api import async_playwright

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/gateway")]

from conftest import CHROMIUM  # noqa: E402
from conversation import ISSUE, LOOK, SYSTEM, Agent, play_group, prepare  # noqa: E402
from history import write_run, write_steps  # noqa: E402
from house import House  # noqa: E402
from policies import make_policy  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402

from harnessed.client import claim, close_turnstile, create_groups, open_turnstile, post_fates, register_engine  # noqa: E402
from harnessed.config import Gateway  # noqa: E402
from harnessed.gateway.keys import ADMIN  # noqa: E402
from harnessed.records import CloseMode, EngineSpec, Fate, GroupSpec  # noqa: E402

RUN = "ranges-8b-4f2a1c"
GROUP = f"{RUN}.step-00181.00"
PAGES = {  # address, height of the picture
    "runs": ("", 460),
    "run": (f"run/{RUN}", 880),
    "group": (f"group/{GROUP}", 800),
    "transcript": (f"rollout/{GROUP}.0", 860),
    "tokens": (f"rollout/{GROUP}.0?tokens=1&colour=logprob", 800),
    "side-by-side": (f"rollout/{GROUP}.0?with={GROUP}.1,{GROUP}.2", 720),
}
WIDTH = 1240


async def furnish(house: House) -> None:
    now = time.time()
    for number, (run, steps, ended_s) in enumerate(
        ((RUN, 180, 60), ("ranges-4b-09be77", 240, 9 * 3600), ("shell-tasks-1b-c3d001", 90, 31 * 3600))
    ):
        begun = now - ended_s - steps * 150

        def write(connection, run=run, steps=steps, begun=begun, number=number):
            write_run(connection, run, f"models/{run.rpartition('-')[0]}", begun)
            write_steps(connection, run, steps, begun=begun, step_s=150, seed=number)

        await house.store.write(write)
    await prepare(house, RUN)
    await house.admin(register_engine(EngineSpec(id="engine-1", url=house.engine.url, run=RUN)))
    await play_group(house, RUN, GROUP, (1.0, 0.25, 0.0, 1.0, 0.5, 1.0))
    booked = {Fate.TRAINED: 337, Fate.UNDELIVERED: 6, Fate.SIDE_CALL: 4, Fate.SUPERSEDED_ATTEMPT: 68}
    await house.admin(post_fates(RUN, {f"{GROUP}.0": booked}))
    task = {"issue": ISSUE}
    await house.admin(
        create_groups([GroupSpec(id=f"{RUN}.step-00181.{n:02d}", run=RUN, task=task, n=8) for n in (1, 2)])
    )


async def work(house: House) -> list[asyncio.Task]:
    """The trainer closes the turnstile while agents wait for the engine; more agents come and are held."""
    claimed = await house.admin(claim(RUN, "controller-1", 9, 3))
    house.engine.paused = True
    messages = [SYSTEM, {"role": "user", "content": ISSUE}]
    tasks = [asyncio.create_task(Agent(house, each.key).ask(messages, LOOK)) for each in claimed[:4]]
    await asyncio.sleep(0.5)
    tasks.append(asyncio.create_task(house.admin(close_turnstile(RUN, "trainer", CloseMode.FINISH, 60, 60))))
    await asyncio.sleep(0.5)
    return tasks + [asyncio.create_task(Agent(house, each.key).ask(messages, LOOK)) for each in claimed[4:]]


async def photograph(house: House, folder: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, (address, height) in PAGES.items():
            for scheme in ("light", "dark") if name == "run" else ("light",):
                page = await browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
                await page.goto(f"{house.url}/ui/#key={house.keys.sign(ADMIN)}")
                await page.wait_for_selector("h1:text('Runs')")
                await page.goto(f"{house.url}/ui/#/{address}")
                await page.wait_for_timeout(1500)  # what is polled has come
                if name == "tokens":
                    await page.hover(".token.sampled >> nth=24")
                path = folder / (f"{name}.png" if scheme == "light" else f"{name}-dark.png")
                await page.screenshot(path=path)
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KB")
                await page.close()
        await browser.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        policy = make_policy(Path("models/ranges-8b"))
        with ScriptedEngine(lambda prompt, call: [], policy=policy) as engine:
            house = House(Path(temporary), policy, engine)
            house.settings = Gateway(generation_limit_s=600)
            async with house.http, house.anthropic_http, house.admin:
                await house.start()
                try:
                    await furnish(house)
                    agents = await work(house)
                    await photograph(house, ROOT / "docs/dashboard")
                    await house.admin(open_turnstile(RUN, "trainer"))
                    engine.paused = False
                    await asyncio.gather(*agents, return_exceptions=True)
                finally:
                    engine.paused = False
                    await house.stop()


asyncio.run(main())
