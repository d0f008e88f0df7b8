#!/usr/bin/env bash
# One worker for each task of a Slurm job. From the root of the repository, with the virtual
# environment active, in a folder that all nodes share:
#
#   sbatch deploy/slurm.sh --gin_file=configs/digits_cnn.gin --model_dir=runs/digits
#   sbatch --nodes=4 --gpus-per-node=1 deploy/slurm.sh --gin_file=...
#
# Before the time limit Slurm sends SIGTERM to the workers; they save and end with status 75, and the
# job goes back into the queue to go on from there. A failure is tried again in the same allocation,
# MAX_RESTARTS times (default 3). A mistake (status 2) ends the job.

#SBATCH --job-name=loopwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -u

# Jobs that share a node must not share ports: sixteen for each job, below the ephemeral ones.
port_base=$((10000 + SLURM_JOB_ID % 1000 * 16))

# One worker's end must not kill the others: they save, or see that it is lost, by themselves.
train() {
  srun --kill-on-bad-exit=0 --wait=0 --label python launch.py "$@" \
    --gin_param="run.strategy = @multi_worker_mirrored" \
    --gin_param="multi_worker_mirrored.resolver = @slurm" \
    --gin_param="slurm.port_base = $port_base"
}

for ((restarts = 0; ; restarts++)); do
  train "$@"
  status=$? # srun's: the highest of its tasks
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
  echo "status $status; starting all again, attempt $((restarts + 1))" >&2
done
