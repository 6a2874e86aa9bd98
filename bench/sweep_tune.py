"""The same search by Ray Tune, as its documentation shows it: ``python -m bench.sweep_tune FOLDER SLOTS SECONDS …``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from bench.sweep_train import STEPS, parser, run


def main() -> None:
    folder, slots, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    import optuna
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    given = parser().parse_args(sys.argv[4:])

    def trainable(config: dict[str, Any]) -> None:
        settings = float(config["lr"]), int(config["width"])
        run(given.kind, given.logs, settings, lambda step, loss: tune.report({"loss": loss, "step": step}))

    ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False)
    sampler = optuna.samplers.TPESampler(seed=given.seed, multivariate=True, constant_liar=True)
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"lr": tune.loguniform(1e-5, 1.0), "width": tune.randint(2, 65)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=OptunaSearch(sampler=sampler),
            scheduler=ASHAScheduler(max_t=STEPS, grace_period=1, reduction_factor=3),
            num_samples=-1,
            time_budget_s=seconds,
            max_concurrent_trials=slots,
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0),
    )
    (folder / "began").write_text(str(time.time()))  # without the start of Ray itself
    tuner.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
