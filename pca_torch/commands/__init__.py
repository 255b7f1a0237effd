"""The commands of `pca-torch`, a file for those that belong together."""
