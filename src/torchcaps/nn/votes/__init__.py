"""Votes: the predictions of the input capsules for the output capsules, which a transform makes for a routing."""

from torchcaps.nn.votes.base import Votes, at_least_tiny
from torchcaps.nn.votes.built import BuiltVotes
from torchcaps.nn.votes.dense import DenseVotes, DiagonalVotes, MatrixVotes, SharedVotes

__all__ = ["BuiltVotes", "DenseVotes", "DiagonalVotes", "MatrixVotes", "SharedVotes", "Votes", "at_least_tiny"]
