"""Tests of the deployment: manifests and image, checked without a cluster."""
