"""The paper's figures as studies, at two scales.

`paper` is the paper's grid. `mini` asks the same question at a size for two cores.

The settings of `mini` were tuned on other seeds than it runs on, over the same grid for TB, TF and iS
(results/tuning-*.toml and .csv). For each environment, the learning rate is the one with the best mean return over the
three methods, each at its best period; then TB and iS take their best period at that rate. On classic control, returns
are averaged over runs with and without LayerNorm, and iS over K = 1 and 3. On MinAtar there is no LayerNorm, and iS has
K = 3. Run lengths were fixed beforehand.

Where the paper does not name its games or values, the choice is ours; docs/deviations.md lists these choices.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from isqn.config.fields import nearest
from isqn.envs.scores import ATARI_15, BATCH_NORM_5, DMC_HARD_7, IMPALA_10, META_3, OFFLINE_10, STREAMING_7
from isqn.study.grid import Study
from isqn.train.record import slug
from isqn.types import UserError

Table = dict[str, Any]

TB: Table = {"scheme": "target-based"}
TF: Table = {"scheme": "target-free"}
TB_WITH_BATCH_NORM: Table = {**TB, "joint_batch_norm": "yes", "name": "TB-SAC, BN"}


def iterated_method(*k: int) -> Table:
    return {"scheme": "iterated-shared", "num_bellman_iterations": list(k) if len(k) > 1 else k[0]}


def atari_tasks(*names: str) -> tuple[Table, ...]:
    return tuple({"env_id": f"ALE/{name}-v5"} for name in names)


def control_tasks(*names: str) -> tuple[Table, ...]:
    """Return tasks of dm_control. Their returns are between 0 and 1,000, which also scales them."""
    scale = {"random_score": 0.0, "reference_score": 1_000.0}
    return tuple({"env_id": f"dm_control/{name}-v0", **scale} for name in names)


WORDLE: Table = {"env_id": "isqn/Wordle-v0", "random_score": -6.0, "reference_score": 0.0}  # worst and best return
PAPER_METHODS = (TB, TF, iterated_method(1, 3, 9, 49))
APPENDIX_D: Table = {"preset": "atari-cnn-ln", "total_timesteps": 10_000_000}  # 40M frames
PERIODS: Table = {"target_update_period": [2_000, 4_000, 8_000, 16_000, 32_000]}
WIDTHS: Table = {"width_factor": [0.5, 1.0, 2.0]}
TYPES: Table = {"compute_dtype": ["float32", "bfloat16"]}

MINI_METHODS = (TB, TF, iterated_method(1, 3, 9))
NEW_SEEDS = tuple(range(10, 15))  # seeds 0 to 2 were used for tuning
CLASSIC: tuple[Table, ...] = (
    {
        "env_id": "Acrobot-v1",
        "update_period": 4,
        "learning_rate": 1e-3,
        "target_update_period": 200,
        "iterated-shared": {"target_update_period": 400},
    },
    {"env_id": "CartPole-v1", "update_period": 4, "learning_rate": 3e-4, "target_update_period": 40},
)
MINATAR: tuple[Table, ...] = (
    {
        "env_id": "MinAtar/Asterix-v1",
        "total_timesteps": 500_000,
        "learning_rate": 1e-3,
        "target_update_period": 200,
    },
    {
        "env_id": "MinAtar/Breakout-v1",
        "total_timesteps": 500_000,
        "learning_rate": 1e-3,
        "target-based": {"target_update_period": 200},
        "iterated-shared": {"target_update_period": 1_000},
    },
    {
        "env_id": "MinAtar/SpaceInvaders-v1",
        "total_timesteps": 500_000,
        "learning_rate": 2.5e-4,
        "target_update_period": 1_000,
    },
)
NORMALISED: Table = {"layer_norm": True}
BOTH_NORMS: Table = {"layer_norm": [False, True]}
MINI_PERIODS: Table = {"target_update_period": [40, 100, 200, 400, 1_000]}

QUESTIONS = {
    "online-ln": (
        "With LayerNorm, how much does removing the target network cost, and do K linear heads recover it?",
        "Figure 3; appendix F.1",
    ),
    "online-plain": (
        "Without normalisation, how much does removing the target network cost, and do K linear heads recover it?",
        "Figure 4, middle and right; appendix F.3",
    ),
    "online-impala": ("Do more heads help with a larger torso?", "Figure 4, left; appendix F.2"),
    "online-batchnorm": ("Does BatchNorm help or harm, with and without a target network?", "appendix F.3, right"),
    "offline": ("Do the heads close the gap in offline learning from a fixed dataset?", "Figure 5; appendix F.4"),
    "continuous": (
        "Do the heads close the gap in actor-critic learning of continuous control?",
        "Figure 6; appendix F.5",
    ),
    "language": ("Do the heads close the gap for a language model?", "Figure 7"),
    "streaming": ("Do the heads help in streaming learning, without a replay buffer?", "Figure 8"),
    "mellowmax": ("Do the heads close the gap with MellowMax in place of the maximum?", "appendix D.1"),
    "ablation-period": ("How much does the target update period T matter?", "appendix D.2"),
    "ablation-heads": (
        "How much do the number of heads and the width of the last hidden layer matter?",
        "appendix D.3",
    ),
    "meta": ("Which Bellman updates get the largest weights, if the weights are learned?", "appendix D.4"),
    "mixed-precision": ("Do the heads close the gap in half precision?", "appendix D.5"),
    "analysis": ("Why do the heads help: gradients, target churn, feature rank, dormant units?", "Figure 9"),
    "training-time": ("How long does an update take?", "appendix B"),
}


PAPER: dict[str, Table] = {
    "online-ln": {"tasks": atari_tasks(*ATARI_15), "methods": PAPER_METHODS, "settings": {"preset": "atari-cnn-ln"}},
    "online-plain": {"tasks": atari_tasks(*ATARI_15), "methods": PAPER_METHODS, "settings": {"preset": "atari-cnn"}},
    "online-impala": {
        "tasks": atari_tasks(*IMPALA_10),
        "methods": PAPER_METHODS,
        "settings": {"preset": "atari-impala-ln"},
    },
    "online-batchnorm": {
        "tasks": atari_tasks(*BATCH_NORM_5),
        "methods": ({**TB, "batch_norm": [False, True]},),
        "settings": {"preset": "atari-cnn"},
        "baseline": "TB-DQN, no BN",
    },
    # datasets come from public logs, by `isqn data convert --subset first --fraction 0.1`
    "offline": {
        "agent": "cql",
        "tasks": tuple(
            {**game, "dataset": f"data/{name}/{{seed}}"}
            for name, game in zip(OFFLINE_10, atari_tasks(*OFFLINE_10), strict=True)
        ),
        "methods": (TB, TF, iterated_method(1, 9), {"scheme": "ensemble-shared", "num_bellman_iterations": 5}),
        "settings": {"preset": "atari-cql", "analysis": True},
        "baseline": "TB-CQL",
        "seeds": tuple(range(1, 6)),  # the runs of the public logs are numbered from 1
    },
    "continuous": {
        "agent": "sac",
        "tasks": control_tasks(*DMC_HARD_7),
        "methods": (TB, TB_WITH_BATCH_NORM, TF, iterated_method(1, 9)),
        "settings": {"preset": "dmc-hard", "analysis": True},
        "baseline": "TB-SAC",
        "seeds": tuple(range(10)),
    },
    "language": {
        "agent": "ilql",
        "tasks": (WORDLE,),
        "methods": (TB, TF, iterated_method(1, 9)),
        "settings": {"preset": "wordle"},
        "baseline": "TB-ILQL",
    },
    "streaming": {
        "agent": "stream-q",
        "tasks": atari_tasks(*STREAMING_7),
        "methods": (TF, iterated_method(1, 3, 9)),
        "settings": {"preset": "atari-stream"},
        "baseline": "TF-Stream Q(λ)",
    },
    "mellowmax": {
        "tasks": (
            {"env_id": "ALE/Breakout-v5", "mellowmax_temperature": 1_000.0},
            {"env_id": "ALE/Seaquest-v5", "mellowmax_temperature": 30.0},
        ),
        "methods": (TB, TF, iterated_method(1, 9)),
        "settings": {**APPENDIX_D, "loss": "mellowmax"},
        "baseline": "TB-Mellow",
    },
    "ablation-period": {
        "tasks": atari_tasks("Tutankham"),
        "methods": ({**TB, **PERIODS}, TF, {**iterated_method(9), **PERIODS}),
        "settings": APPENDIX_D,
        "along": "target_update_period",
        "baseline": "TB-DQN, T=8000",
    },
    "ablation-heads": {
        "tasks": atari_tasks("CrazyClimber", "Tutankham"),
        "methods": ({**TF, **WIDTHS}, {**iterated_method(1, 3, 9, 29, 49), **WIDTHS}),
        "settings": APPENDIX_D,
        "along": "num_bellman_iterations",
        "panels": "width_factor",
        "baseline": "TF-DQN",
    },
    "meta": {
        "tasks": atari_tasks(*META_3),
        "methods": (iterated_method(1, 9), {**iterated_method(9), "meta_gradient": "adam"}),
        "settings": APPENDIX_D,
        "baseline": "iS-DQN K=9",
    },
    "mixed-precision": {
        "tasks": atari_tasks("Breakout"),
        "methods": ({**TB, **TYPES}, {**TF, **TYPES}, {**iterated_method(1, 9), **TYPES}),
        "settings": APPENDIX_D,
        "panels": "compute_dtype",
    },
    "analysis": {
        "tasks": atari_tasks(*ATARI_15),
        "methods": (TB, TF, iterated_method(1, 9)),
        "settings": {"preset": "atari-cnn-ln", "analysis": True},
    },
    "training-time": {
        "tasks": atari_tasks("Asterix"),
        "methods": PAPER_METHODS,
        "settings": {"preset": "atari-cnn-ln"},
        "seeds": (0,),
        "flops": True,
    },
}

# Fields that differ from the paper's grid.
MINI: dict[str, Table] = {
    "online-ln": {"tasks": (*CLASSIC, *MINATAR), "methods": MINI_METHODS, "settings": NORMALISED},
    "online-plain": {"tasks": (*CLASSIC, *MINATAR), "methods": MINI_METHODS, "settings": {}},
    # a larger torso: twice the width of the other studies
    "online-impala": {
        "tasks": CLASSIC,
        "methods": (TB, TF, iterated_method(1, 9, 49)),
        "settings": {**NORMALISED, "hidden_sizes": [256, 256]},
    },
    "online-batchnorm": {
        "tasks": CLASSIC,
        "methods": tuple({**method, "batch_norm": [False, True]} for method in (TB, TF, iterated_method(9))),
        "settings": {},
    },
    # As in the paper, a dataset is the first 10 % of each of 50 parts of a TB-DQN run's steps. A score of 1 is the mean
    # return of that run during training, because offline agents may hardly beat random play.
    "offline": {
        "tasks": tuple(
            {"env_id": task["env_id"], "dataset": f"data/{slug(task['env_id'])}", "reference_score": score}
            for task, score in zip(MINATAR, (4.0, 4.0, 23.0), strict=True)
        ),
        "settings": {"preset": "minatar-cql", **NORMALISED, "analysis": True, "log_period_updates": 3_000},
        "datasets": {
            "preset": "minatar",
            "scheme": "target-based",
            "total_timesteps": 500_000,
            "subset": "first",
            "fraction": 0.1,
            "checkpoints": 50,
        },
        "seeds": NEW_SEEDS,
    },
    # not tuned: the paper's settings, with a small critic
    "continuous": {
        "tasks": control_tasks("cartpole-swingup", "walker-walk"),
        "settings": {"preset": "dmc-small", "analysis": True},
        "seeds": NEW_SEEDS,
    },
    # tau is the best of 0.005 to 0.3, for TB and for iS each
    "language": {
        "tasks": ({**WORDLE, "target-based": {"target_step_size": 0.3}},),
        "settings": {"preset": "wordle-mini"},
        "seeds": NEW_SEEDS,
    },
    # not tuned: the settings of the paper, and of the code of Stream Q on MinAtar
    "streaming": {
        "tasks": tuple({"env_id": task["env_id"]} for task in MINATAR),
        "settings": {"preset": "minatar-stream"},
    },
    "mellowmax": {
        "tasks": CLASSIC,
        "settings": {**NORMALISED, "loss": "mellowmax", "mellowmax_temperature": 30.0},
    },
    "ablation-period": {
        "tasks": CLASSIC,
        "methods": (
            {**TF, **BOTH_NORMS},
            *({**method, **BOTH_NORMS, **MINI_PERIODS} for method in (TB, iterated_method(1), iterated_method(9))),
        ),
        "settings": {},
        "panels": "layer_norm",
        "baseline": "TB-DQN, T=200",
    },
    "ablation-heads": {
        "tasks": CLASSIC[:1],  # on CartPole there is no gap to close
        "settings": NORMALISED,
    },
    "meta": {
        # the learning rate of the weights is the network's, as in the authors' code
        "tasks": tuple({**task, "meta_learning_rate": task["learning_rate"]} for task in CLASSIC),
        "settings": NORMALISED,
    },
    "mixed-precision": {"tasks": CLASSIC, "settings": NORMALISED},
    "analysis": {
        "tasks": (CLASSIC[0], {**MINATAR[1], "total_timesteps": 250_000, "epoch_steps": 12_500}),
        "settings": {**NORMALISED, "analysis": True, "log_period_steps": 5_000},
    },
    # the paper's setting, just long enough to measure its speed
    "training-time": {
        "settings": {
            "preset": "atari-cnn-ln",
            "total_timesteps": 2_000,
            "epoch_steps": 500,
            "log_period_steps": 200,
            "learning_starts": 200,
            "buffer_size": 5_000,
        },
        "seeds": (10, 11, 12),
    },
}


def find_study(name: str, scale: str) -> Study:
    """Return a study of the paper by its name."""
    if name not in QUESTIONS:
        raise UserError(f"There is no study {name!r}; {nearest(name, QUESTIONS)} A study of your own is a .toml file.")
    fields = PAPER[name] | (MINI[name] if scale == "mini" else {})
    question, paper = QUESTIONS[name]
    defaults: Table = {"baseline": "TB-DQN", "seeds": NEW_SEEDS if scale == "mini" else tuple(range(5))}
    return Study(name=name, question=question, paper=paper, scale=scale, **defaults | fields)


def format_command(study: Study) -> str:
    """Return the command that trains a study: by its name if it is one of the paper's, or a part of one."""
    if study.name in QUESTIONS:
        known = find_study(study.name, study.scale)
        tasks = [task["env_id"] for task in study.tasks if len(study.tasks) < len(known.tasks)]
        seeds = [str(seed) for seed in study.seeds if study.seeds != known.seeds]
        words = [*(["--tasks", *tasks] if tasks else []), *(["--seeds", *seeds] if seeds else [])]
        with suppress(UserError):  # a task that the known study does not have
            if known.only(tuple(tasks), study.seeds) == study:
                out = ["--out", "FOLDER"] if words else []  # a part needs its own folder
                return " ".join(["isqn study", study.name, "--scale", study.scale, *words, *out])
    return "isqn study study.toml"  # the file that the report shows
