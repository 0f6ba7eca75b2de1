"""Parameter server and local SGD: ranks that do not agree in every step."""
