"""Measure the random baselines that ship (slm_lab/experiment/analysis/baselines.json): python tools/baselines.py [ENV_ID …]

Without ids all of them: about 20 minutes on one core (6 for Enduro, whose games are long).
Uses backend sync for Gymnasium's envs and ALE's vector env.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slm_lab.experiment.analysis.baseline import SHIPPED, baseline_key, measure
from slm_lab.spec.env import EnvSpec

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "LunarLander-v3", "BipedalWalker-v3")
MUJOCO = (
    *("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "HumanoidStandup-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5"),
    *("Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5"),
)
ATARI = ("Pong", "Breakout", "Qbert", "BeamRider", "Seaquest", "SpaceInvaders", "Enduro", "MsPacman")
ENVS: list[dict[str, Any]] = [
    *({"name": name, "backend": "sync"} for name in (*CLASSIC, *MUJOCO, "slm_lab.env.masked:MaskedCartPole-v1")),
    {"name": "LunarLander-v3", "backend": "sync", "continuous": True},
    *({"name": f"ALE/{game}-v5", "backend": "ale"} for game in ATARI),
]


def main() -> None:
    known: dict[str, float] = json.loads(SHIPPED.read_text(encoding="utf-8")) if SHIPPED.exists() else {}
    for env in ENVS:
        if sys.argv[1:] and env["name"] not in sys.argv[1:]:
            continue
        spec, begin = EnvSpec(**env, max_frame=1), time.perf_counter()
        mean_return = measure(spec).mean_return
        if mean_return is None:
            raise SystemExit(f"{spec.name}: no episode ended")
        known[baseline_key(spec)] = float(f"{mean_return:.6g}")
        sys.stdout.write(f"{baseline_key(spec)}: {mean_return:.6g} ({time.perf_counter() - begin:.1f} s)\n")
        sys.stdout.flush()
        SHIPPED.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
