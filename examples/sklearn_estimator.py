"""Use a capsule network with scikit-learn: cross-validation, a pipeline, a grid search, calibrated probabilities.

    python examples/sklearn_estimator.py

The data are scikit-learn's digits (8×8 pixels of 0..16), so the convolutions are small. The script prints the accuracy
of each fold, a grid over routing iterations and softmax axes, and the test accuracy of the best setting. For one image
it prints the capsule lengths, which are not probabilities, and the probabilities after calibration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from torchcaps.sklearn import CapsNetClassifier

SMALL = {
    "conv_kernel": 3,
    "conv_channels": 32,
    "primary_kernel": 3,
    "primary_stride": 1,
    "primary_types": 4,
    "decoder": False,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit as the options say, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each fit (default: %(default)s)")
    parser.add_argument("--images", type=int, default=1797, help="number of images (default: all 1797)")
    given = parser.parse_args(arguments)
    pixels, labels = load_digits(return_X_y=True)  # (1797, 64), values 0..16
    X, X_test, y, y_test = train_test_split(
        pixels[: given.images], labels[: given.images], test_size=0.2, stratify=labels[: given.images], random_state=0
    )
    network = CapsNetClassifier(
        options=SMALL, image_shape=(8, 8), epochs=given.epochs, learning_rate=5e-3, random_state=0
    )

    folds = cross_val_score(network, X / 16, y, cv=3)
    print("accuracy of three folds:", *(f"{fold:.4f}" for fold in folds))

    # clip=True, because pixels outside the range of the training fold would leave 0..1
    pipeline = make_pipeline(MinMaxScaler(clip=True), network)
    grid = {"capsnetclassifier__num_iterations": [1, 3], "capsnetclassifier__softmax_over": ["outputs", "inputs"]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(X, y)
    for settings, mean in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        print(f"{mean:.4f}", *settings.values())
    print(f"test accuracy of the best: {search.score(X_test, y_test):.4f}")

    print("lengths of an image's capsules:", *(f"{length:.2f}" for length in search.decision_function(X_test[:1])[0]))
    calibrated = CalibratedClassifierCV(search.best_estimator_, cv=3).fit(X, y)
    print("calibrated probabilities:      ", *(f"{share:.2f}" for share in calibrated.predict_proba(X_test[:1])[0]))


if __name__ == "__main__":
    main()
