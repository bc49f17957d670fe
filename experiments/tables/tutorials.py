"""(e) The tutorials' own runs."""

from __future__ import annotations

from experiments.table import Row, Table

OUTPUTS, WORSE = "Keras tutorial, softmax over outputs", "significantly worse than over inputs"
NOTEBOOK, ARTICLE = "0.47 % (99.53 % accuracy)", "0.34 ± 0.029 % (50 epochs)"

TABLE = Table(
    name="tutorials",
    title="The tutorials' own runs",
    rows=(
        Row("keras-tutorial-r0", "Keras tutorial, no routing", "keras-tutorial-r0", {}),
        Row("keras-tutorial-r1", "Keras tutorial, 1 iteration", "keras-tutorial-r1", {}),
        Row("keras-tutorial-r2", "Keras tutorial, 2 iterations", "keras-tutorial-r2", {}),
        Row("keras-tutorial-r3", "Keras tutorial, 3 iterations", "keras-tutorial-r3", {}),
        Row("keras-tutorial", "Keras tutorial, 4 iterations", "keras-tutorial", {}),
        Row("keras-tutorial-outputs", OUTPUTS, "keras-tutorial-outputs", {}, published=WORSE),
        Row("tf-notebook", "TensorFlow notebook", "tf-notebook", {}, published=f"{NOTEBOOK}, with earlier epochs"),
        Row(
            "tf-notebook-20-epochs",
            "TensorFlow notebook, 10 epochs more",
            "tf-notebook",
            {"epochs": 20},
            full=True,
            published=f"{NOTEBOOK}, earlier epochs unknown",
            published_error=0.47,
        ),
        Row("torch-notebook-1-epoch", "PyTorch notebook: 1 epoch", "torch-notebook", {"epochs": 1}),
        Row("torch-notebook", "PyTorch notebook", "torch-notebook", {}, full=True),
        Row("torch-tutorial-1-epoch", "PyTorch article: 1 epoch", "torch-tutorial", {"epochs": 1}, published=ARTICLE),
        Row(
            "torch-tutorial",
            "PyTorch article",
            "torch-tutorial",
            {},
            full=True,
            published=ARTICLE,
            published_error=0.34,
        ),
    ),
)
