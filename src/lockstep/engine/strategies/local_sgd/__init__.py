"""Local SGD and DiLoCo: ranks train independently between averages of their parameters."""
