"""Moving bytes: a pure copy planner, and the engine that runs its plans on a backend's streams."""
