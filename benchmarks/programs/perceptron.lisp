;;; A perceptron 784-512-512-10 at batch 128 with Adam: so small that the launches of a step are its time.
;;; Read by benchmarks/small.py, which makes its batches itself.
(import "nn" "optim" "loss")

(defknob batch 128 "samples in a step")
(defknob precision tf32 "arithmetic" :one-of (f32 tf32 bf16 f64))

(defdata points (csv "points.csv" :fields ((x f32 [784]) (label i32))) :split ((train 1)))

(deflayer perceptron (x)
  (linear (relu (linear (relu (linear x 512 :name "first")) 512 :name "second")) 10 :name "out"))

(defun entropy (x label)
  (cross-entropy (perceptron x) label))

(defrun train
  :data (batches points :split train :batch batch :shuffle true)
  :loss entropy
  :optimizer (adam :lr 1e-3)
  :precision precision
  :steps 1000
  :seed 0)
