"""Presets of `isqn train ilql`."""

from __future__ import annotations

from isqn.language.agent import IlqlConfig
from isqn.presets.preset import Choices, Preset, is_any

# Paper, Table 3.
_WORDLE = IlqlConfig(
    discount=0.99,
    batch_size=1_024,
    num_layers=12,  # GPT-2 small
    model_width=768,
    attention_heads=12,
    num_positions=1_024,
    dropout=0.1,
    head_hidden_size=1_536,
    num_updates=37_500,  # of 16 micro-batches each: the paper's 600,000 gradient steps, see below
    target_step_size=5e-3,
    learning_rate=1e-5,
    inverse_temperature=4.0,
    conservative_weight=1e-4,
    # not specified in the paper; the code of ILQL (Snell et al. 2023), of which the paper's is a fork
    micro_batch_size=64,  # the code of ILQL counts each micro-batch as a step
    target_update_period=1,
    adam_epsilon=1e-8,
    expectile_level=0.7,
    word_list="answers-200",
    # not specified in the paper
    epoch_updates=625,  # 60 evaluations
    log_period_updates=25,
)
# Ours: 40 words, and players whose guesses are mostly careless, so that the values of guesses matter.
_WORDLE_MINI = IlqlConfig(
    discount=0.99,
    batch_size=32,
    num_layers=2,
    model_width=64,
    attention_heads=4,
    num_positions=74,
    micro_batch_size=8,  # on a CPU 0.7 of the time of 32 at once: memory is reused between updates
    dropout=0.0,
    head_hidden_size=128,
    learning_rate=1e-3,
    num_words=40,
    players="mixture",
    careless_share=0.6,
    target_step_size=0.05,  # the best of 0.005 to 0.3 for iS (results/tuning-language.csv)
    num_updates=2_500,
    epoch_updates=100,
    log_period_updates=50,
)

PRESETS = {
    "wordle": Preset("ILQL with GPT-2 small on Wordle", _WORDLE),
    "wordle-mini": Preset("ILQL with two small layers on 40 words of Wordle, on a laptop", _WORDLE_MINI),
}
DEFAULTS: Choices = ((is_any, "wordle-mini"),)
