"""Decode mode on CUDA: rows of many sequences over shared documents and private tails."""
