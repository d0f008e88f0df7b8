#!/usr/bin/env bash
# Runs one worker per task of a Slurm job. Submit it from the root of the repository, in a folder that
# all nodes share, with the virtual environment active:
#
#   sbatch deploy/slurm.sh --gin_file=configs/digits_cnn.gin --model_dir=runs/digits
#   sbatch --nodes=4 --gpus-per-node=1 deploy/slurm.sh --gin_file=...
#
# Before the time limit Slurm sends SIGTERM to the workers. They save and exit with status 75, and the
# job is queued again and continues. After a failure the workers restart in the same allocation,
# up to MAX_RESTARTS times (default 3). A mistake (status 2) ends the job.

#SBATCH --job-name=loopwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -u

# Only workers with this job's secret meet. `mktemp` makes a file that only its owner can read.
if [[ -z ${LOOPWRIGHT_CLUSTER_SECRET-}${LOOPWRIGHT_CLUSTER_SECRET_FILE-} ]]; then
  mkdir -p runs
  secret=$PWD/runs/.secret-${SLURM_CLUSTER_NAME-}-$SLURM_JOB_ID-
  rm -f "$secret"* # of an attempt that was killed
  secret=$(mktemp "${secret}XXXXXX") || exit 1
  trap 'rm -f "$secret"' EXIT
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$secret"
  export LOOPWRIGHT_CLUSTER_SECRET_FILE=$secret
fi

# Jobs on one node need different ports: 16 per job, below the ephemeral range.
port_base=$((10000 + SLURM_JOB_ID % 1000 * 16))

# Do not kill the others when one worker ends: they save, or detect the loss, by themselves.
train() {
  srun --kill-on-bad-exit=0 --wait=0 --label python launch.py "$@" \
    --gin_param="run.strategy = @multi_worker_mirrored" \
    --gin_param="multi_worker_mirrored.resolver = @slurm" \
    --gin_param="slurm.port_base = $port_base"
}

# When srun itself is killed, its tasks go on and own model_dir. The next srun waits for their end.
end_steps() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep '\.[0-9]*$' |
    xargs --no-run-if-empty scancel --signal=KILL
}

for ((restarts = 0; ; restarts++)); do
  train "$@"
  status=$? # the highest status of all tasks
  case $status in
    0 | 2) exit "$status" ;;
    75)
      scontrol requeue "$SLURM_JOB_ID" # which also ends this script
      exit 75
      ;;
  esac
  if ((restarts >= ${MAX_RESTARTS:-3})); then
    exit "$status"
  fi
  echo "status $status; restarting all workers, attempt $((restarts + 1))" >&2
  end_steps
done
