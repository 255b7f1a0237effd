"""`python -m pca_torch` is the command `pca-torch`."""

from pca_torch.cli import main

if __name__ == "__main__":
    main()
