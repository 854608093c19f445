"""What is deployed: manifests and image, checked without a cluster."""
